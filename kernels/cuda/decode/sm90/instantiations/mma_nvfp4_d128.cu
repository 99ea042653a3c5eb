#include "kernels/cuda/decode/sm90/mma_rings_launch.cuh"

TRIBUTARY_MMA_RINGS(::tributary::DType::kNvfp4, 128, 128)
