// Attention of 16 to 64 columns at a time; see wgmma_attention.cuh. sm_90a only.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

// Groups of 16 tokens that a block of threads takes in one round.
inline constexpr int kWgmmaShareGroups = 8;

// Launches, or says why it could not.
template <DType kKv, int kHeadDim, int kColumns>
cudaError_t RunWgmmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
