// The launch of prefill on sm_100; sm100_prefill.cu holds the kernel's place.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dtype.h"

namespace tributary::cuda {

struct PrefillKernelArgs;

// Launches `blocks` thread blocks, or says why it could not. It is defined for the rows of
// kernels/head_dims.h whose column prefill_sm100 says true, and linked by builds with
// TRIBUTARY_SM100_KERNELS.
template <DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunSm100Prefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace tributary::cuda
