// Attention of 64 packed rows at a time over an FP8 or NVFP4 cache with head dim 128, queries in
// bf16, without a soft cap; see wgmma_fp8_attention.cuh. sm_90a only. Plans are those of
// RunWgmmaAttention.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

// Launches, or says why it could not.
template <DType kKv>
cudaError_t RunWgmmaFp8Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
