// The launch of decode on sm_100; sm100_attention.cu holds the kernel's place.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/launch/grid.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

struct AttentionArgs;

// Launches the kernel, or returns why it could not. It is defined for the rows of
// kernels/head_dims.h whose column decode_sm100 says true, and linked by builds with
// TRIBUTARY_SM100_KERNELS.
template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunSm100Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
