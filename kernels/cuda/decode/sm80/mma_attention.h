// Attention of query tiles of 8 or 16 packed rows; see mma_attention.cuh. sm_80 and later.
//
// Each comes in two shapes: one thread block per multiprocessor, which splits long sequences into
// fewer parts, or two of half as many warps, of which one keeps memory busy while the other ends an
// item. mma_config.h has the shapes.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

// Launches the kernel, or returns why it could not.
template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
