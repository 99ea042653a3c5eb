#include "kernels/cuda/decode/sm80/mma_attention_launch.cuh"

TRIBUTARY_MMA_ATTENTION(::tributary::DType::kFp8E5M2, 256, 256)
