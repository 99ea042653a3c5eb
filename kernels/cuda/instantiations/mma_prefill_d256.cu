#include "kernels/cuda/mma_prefill_launch.cuh"

TRIBUTARY_MMA_PREFILL(256)
