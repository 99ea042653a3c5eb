// From CUDA's errors to Status.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "kernels/status.h"

namespace tributary::cuda {

// kInternal for every error: on these floors an error of CUDA is a bug or a lost GPU, and the
// caller cannot tell which. (worker/cuda/status.h tells them apart, where the answer goes to a
// client.) `what` says what was tried. The error is also taken off CUDA's own record, so that the
// next cudaGetLastError does not find it again.
inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::Ok();
  (void)cudaGetLastError();
  return {StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

}  // namespace tributary::cuda
