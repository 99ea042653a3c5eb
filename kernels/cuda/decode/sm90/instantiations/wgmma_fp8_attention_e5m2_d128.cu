#include "kernels/cuda/decode/sm90/wgmma_fp8_attention_launch.cuh"

TRIBUTARY_WGMMA_FP8_ATTENTION(::tributary::DType::kFp8E5M2, 128)
