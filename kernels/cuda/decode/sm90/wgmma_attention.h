// Attention of query tiles of 32 or 64 packed rows; see wgmma_attention.cuh. sm_90a only.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

// Strips that a thread block takes in one round.
inline constexpr int kWgmmaShareStrips = 8;

// The packed rows of the tallest query tile whose accumulators fit the registers of two warpgroups.
constexpr int32_t WidestWgmmaTile(int32_t value_dim) { return value_dim > 128 ? 32 : 64; }

// Launches, or says why it could not. kTileRows is 32, or WidestWgmmaTile(kValueDim).
template <DType kKv, int kKeyDim, int kValueDim, int kTileRows>
cudaError_t RunWgmmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
