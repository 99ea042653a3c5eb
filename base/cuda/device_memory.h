// What processes that share memory of a GPU tell each other about it. The client library describes
// memory with it, and a worker opens memory with it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace tributary::cuda {

// "GPU-" and 8-4-4-4-12 hexadecimal digits, as nvidia-smi -L prints it: the same in every process,
// which ordinals are not.
std::string UuidOf(const cudaDeviceProp& device);

// 16 random bytes, the same for as long as the process lives. A process that receives a handle
// compares them with its own, because CUDA does not open a handle in the process that made it.
const std::string& ProcessNonce();

// One allocation of cudaMalloc.
struct Allocation {
  std::byte* base = nullptr;
  size_t bytes = 0;
};
// The whole allocation that `data` lies in: one of this process, or one mapped into it.
// INVALID_ARGUMENT when `data` points to no memory of a GPU, FAILED_PRECONDITION when the driver is
// too old to say.
absl::StatusOr<Allocation> FindAllocation(const void* data);

}  // namespace tributary::cuda
