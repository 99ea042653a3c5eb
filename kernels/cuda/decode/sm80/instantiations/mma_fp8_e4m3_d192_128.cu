#include "kernels/cuda/decode/sm80/mma_attention_launch.cuh"

TRIBUTARY_MMA_ATTENTION(::tributary::DType::kFp8E4M3, 192, 128)
