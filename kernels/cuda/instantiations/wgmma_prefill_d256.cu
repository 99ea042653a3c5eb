#include "kernels/cuda/wgmma_prefill_launch.cuh"

TRIBUTARY_WGMMA_PREFILL(256)
