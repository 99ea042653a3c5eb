#include "kernels/cuda/mma_attention_launch.cuh"

TRIBUTARY_MMA_ATTENTION(::tributary::DType::kBf16, 128)
