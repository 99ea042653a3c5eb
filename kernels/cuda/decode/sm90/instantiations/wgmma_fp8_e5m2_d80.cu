#include "kernels/cuda/decode/sm90/wgmma_attention_launch.cuh"

TRIBUTARY_WGMMA_ATTENTION(::tributary::DType::kFp8E5M2, 80, 80, 32)
TRIBUTARY_WGMMA_ATTENTION(::tributary::DType::kFp8E5M2, 80, 80, 64)
