// Prefill by warpgroup products; see wgmma_prefill.cuh. sm_90a only.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dtype.h"

namespace tributary::cuda {

struct PrefillKernelArgs;

inline constexpr int kWgmmaPrefillRows = 128;
// Keys of a tile: what two stages of shared memory and the accumulators of a warpgroup allow.
constexpr int WgmmaPrefillKeys(int head_dim) { return head_dim == 256 ? 64 : 128; }

// Launches `blocks` blocks, or says why it could not. kScores is the type of keys, and of queries
// unless keys have eight bits: then they are e4m3. kCompute is the type of values.
template <DType kScores, DType kCompute, int kHeadDim>
cudaError_t RunWgmmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace tributary::cuda
