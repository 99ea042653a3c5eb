// mma_attention over NVFP4 with strips that come through shared memory (mma_rings.cuh). sm_90a
// only.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// Launches, or says why it could not. Shapes, grids and plans are those of RunMmaAttention.
template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaWithRings(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
