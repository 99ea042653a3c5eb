#include "kernels/cuda/prefill/sm80/mma_prefill_launch.cuh"

TRIBUTARY_MMA_PREFILL(64, 64)
