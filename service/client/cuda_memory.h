// For hosts that compute with CUDA: what a client says of memory of a GPU.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "service/client/client.h"

namespace tributary::client {

// Of bytes [data, data + bytes) of an allocation of this process by cudaMalloc. INVALID_ARGUMENT
// when they are not of one such allocation, or it cannot be shared (cudaMallocAsync, managed
// memory).
absl::StatusOr<DeviceMemory> DescribeDeviceMemory(const void* data, uint64_t bytes);

}  // namespace tributary::client
