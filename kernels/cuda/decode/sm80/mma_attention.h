// Attention of 8 or 16 columns at a time; see mma_attention.cuh. sm_80 and later.
//
// In two shapes: one block to a multiprocessor, which cuts long rows into fewer pieces, or two of
// half the warps, of which one keeps memory busy while the other ends an item.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

// Launches, or says why it could not.
template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

// The warps of a block, each of which takes every so-many-th group of 16 tokens.
template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
int MmaWarps();

}  // namespace tributary::cuda
