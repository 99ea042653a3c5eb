// The launch of prefill by warpgroup products (sm_90a only); wgmma_prefill.cuh holds the kernel.
#pragma once

#include <cuda_runtime.h>

#include "kernels/dtype.h"

namespace tributary::cuda {

struct PrefillKernelArgs;

// Launches `blocks` thread blocks, or says why it could not. kScores is the type of keys, and of
// queries unless keys have eight bits: then queries are e4m3. kCompute is the type of values; in
// eight bits it is that of keys, weights are e4m3, and keys and values lie as a gather transposes
// them (KeptFp8::kKeysAndValues). One definition per row of kernels/head_dims.h lies in
// instantiations/.
template <DType kScores, DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunWgmmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream);

}  // namespace tributary::cuda
