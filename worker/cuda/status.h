// From CUDA's errors to absl::Status.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "base/status/status_macros.h"

namespace tributary::worker {

// kResourceExhausted: the device has no memory left, and nothing was changed.
// kDataLoss: the process's context on this GPU is gone, and with it every shard it held.
// kFailedPrecondition: there is no GPU, or no driver for it.
// kInternal: everything else. The error is also taken off CUDA's own record.
absl::Status FromCuda(const char* what, cudaError_t error);

}  // namespace tributary::worker

// Returns early from a function that returns absl::Status or absl::StatusOr.
#define TRIBUTARY_CUDA_OK(call) \
  TRIBUTARY_RETURN_IF_ERROR(::tributary::worker::FromCuda(#call, call))
