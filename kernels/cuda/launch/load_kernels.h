// Brings kernels' code onto the current device before it is needed.
//
// CUDA does that at the first launch, which may then wait for every kernel that is running: for one
// that waits for a peer, for ever.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <string>

#include "kernels/cuda/status.h"
#include "kernels/status.h"

namespace tributary::cuda {

// `what` names them in errors.
inline Status LoadKernels(std::span<const void* const> kernels, const char* what) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return CudaStatus(error, (std::string("loading ") + what).c_str());
  }
  return Status::Ok();
}

}  // namespace tributary::cuda
