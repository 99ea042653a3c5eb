#include "kernels/cuda/decode/sm80/mma_attention_launch.cuh"

TRIBUTARY_MMA_ATTENTION(::tributary::DType::kNvfp4, 80, 80)
