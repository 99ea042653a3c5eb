#include "service/client/cuda_memory.h"

#include <cuda_runtime.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/status/errors.h"

namespace tributary::client {
namespace {

absl::Status CudaError(absl::string_view what, cudaError_t error) {
  cudaGetLastError();
  return InvalidField("data", absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

}  // namespace

absl::StatusOr<DeviceMemory> DescribeDeviceMemory(const void* data, uint64_t bytes) {
  cudaPointerAttributes attributes;
  if (const cudaError_t e = cudaPointerGetAttributes(&attributes, data); e != cudaSuccess) {
    return CudaError("cannot be looked at", e);
  }
  if (attributes.type != cudaMemoryTypeDevice) return InvalidField("data", "is no memory of a GPU");
  const absl::StatusOr<cuda::Allocation> allocation = cuda::FindAllocation(data);
  if (!allocation.ok()) return InvalidField("data", allocation.status().message());
  DeviceMemory memory{.data = data, .bytes = bytes};
  memory.offset = static_cast<uint64_t>(static_cast<const std::byte*>(data) - allocation->base);
  if (bytes > allocation->bytes - memory.offset) {
    return InvalidField("bytes", absl::StrCat(allocation->bytes - memory.offset,
                                              " bytes are left of the allocation"));
  }
  cudaIpcMemHandle_t handle;
  if (const cudaError_t e = cudaIpcGetMemHandle(&handle, allocation->base); e != cudaSuccess) {
    return CudaError("cannot be shared", e);
  }
  memory.ipc_handle.assign(reinterpret_cast<const char*>(&handle), sizeof(handle));
  cudaDeviceProp device;
  if (const cudaError_t e = cudaGetDeviceProperties(&device, attributes.device); e != cudaSuccess) {
    return CudaError("its GPU cannot be looked at", e);
  }
  memory.gpu = cuda::UuidOf(device);
  return memory;
}

}  // namespace tributary::client
