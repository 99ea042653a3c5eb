// The launch of prefill by mma.sync (sm_80 and later); mma_prefill.cuh holds the kernel.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dtype.h"

namespace tributary::cuda {

struct PrefillKernelArgs;

// Launches `blocks` thread blocks, or says why it could not. kCompute is the type of queries, keys
// and values. One definition per row of kernels/head_dims.h lies in instantiations/.
template <DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunMmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace tributary::cuda
