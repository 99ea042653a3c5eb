#include "kernels/cuda/prefill/sm90/wgmma_prefill_launch.cuh"

TRIBUTARY_WGMMA_PREFILL(64, 64)
