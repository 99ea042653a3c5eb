#include "kernels/cuda/decode/sm90/wgmma_attention_launch.cuh"

TRIBUTARY_WGMMA_ATTENTION(::tributary::DType::kFp8E5M2, 256, 256, 32)
