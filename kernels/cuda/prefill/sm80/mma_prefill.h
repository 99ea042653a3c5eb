// Prefill by mma.sync; see mma_prefill.cuh. sm_80 and later.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dtype.h"

namespace tributary::cuda {

struct PrefillKernelArgs;

// Rows of a block: 32 a warp, or 16 where the output would not fit the registers.
constexpr int MmaPrefillRows(int head_dim) { return head_dim == 256 ? 64 : 128; }
// Keys of a tile: what lets two stages fit the 99 KB of shared memory of an sm_86.
constexpr int MmaPrefillKeys(int head_dim) { return head_dim == 256 ? 32 : 64; }

// Launches `blocks` blocks, or says why it could not.
template <DType kCompute, int kHeadDim>
cudaError_t RunMmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace tributary::cuda
