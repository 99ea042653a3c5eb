// Merges the pieces of jobs that were cut, by a launch of its own.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/attention_args.h"

namespace tributary::cuda {

// For partials of kColumns columns (32 or 64). The grid is sized for `cut_jobs` jobs; any number is
// merged.
template <int kHeadDim, int kColumns>
cudaError_t RunMergePieces(const AttentionArgs& args, int cut_jobs, cudaStream_t stream);

}  // namespace tributary::cuda
