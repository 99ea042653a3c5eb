#include "kernels/cuda/decode/sm90/wgmma_attention_launch.cuh"

TRIBUTARY_WGMMA_ATTENTION(::tributary::DType::kBf16, 192, 192, 32)
