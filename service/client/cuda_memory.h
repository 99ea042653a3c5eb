// For hosts that compute with CUDA: how a host describes its GPU memory to the client.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "service/client/client.h"

namespace tributary::client {

// Describes the bytes [data, data + bytes), which must lie in one allocation that this process made
// with cudaMalloc. INVALID_ARGUMENT when they do not, or when the allocation cannot be shared
// (cudaMallocAsync, managed memory).
absl::StatusOr<DeviceMemory> DescribeDeviceMemory(const void* data, uint64_t bytes);

}  // namespace tributary::client
