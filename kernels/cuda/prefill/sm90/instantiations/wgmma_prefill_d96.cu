#include "kernels/cuda/prefill/sm90/wgmma_prefill_launch.cuh"

TRIBUTARY_WGMMA_PREFILL(96, 96)
