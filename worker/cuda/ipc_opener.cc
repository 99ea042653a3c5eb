#include "worker/cuda/ipc_opener.h"

#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/cuda/device_memory.h"
#include "base/status/errors.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

absl::Status OutOfReach(absl::string_view why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "cuda_ipc.device_uuid", why);
}

absl::Status CheckReach(int gpu, int owner, const std::string& uuid) {
  if (owner < 0) {
    return OutOfReach(absl::StrCat("the service does not see ", uuid,
                                   " (is it on this machine, and in CUDA_VISIBLE_DEVICES?)"));
  }
  if (owner == gpu) return absl::OkStatus();
  int reaches = 0;
  TRIBUTARY_CUDA_OK(cudaDeviceCanAccessPeer(&reaches, gpu, owner));
  if (reaches != 0) return absl::OkStatus();
  return OutOfReach(absl::StrCat("GPU ", gpu, " of the service has no peer access to ", uuid));
}

// What cudaIpcOpenMemHandle's errors mean to who gave the handle. Never one that ends the group:
// anybody may send any handle, and a GPU that failed shows at the next step.
absl::Status OpenError(cudaError_t error) {
  cudaGetLastError();
  const std::string name = absl::StrCat(" (", cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorDeviceUninitialized:  // of the driver: the context is not valid for this
      return InvalidField("cuda_ipc.raw_handle",
                          absl::StrCat("is of memory of the service's own process, which CUDA "
                                       "shares with other processes only",
                                       name));
    case cudaErrorTooManyPeers:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorNotSupported:
      return OutOfReach(absl::StrCat(cudaGetErrorString(error), name));
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(absl::StrCat("cuda_ipc: cannot be mapped", name));
    default:
      return InvalidField("cuda_ipc.raw_handle",
                          absl::StrCat("names no memory of a live process on this machine", name));
  }
}

}  // namespace

absl::StatusOr<int> FindGpu(const std::string& uuid) {
  int count = 0;
  TRIBUTARY_CUDA_OK(cudaGetDeviceCount(&count));
  for (int gpu = 0; gpu < count; ++gpu) {
    cudaDeviceProp properties;
    TRIBUTARY_CUDA_OK(cudaGetDeviceProperties(&properties, gpu));
    if (absl::EqualsIgnoreCase(cuda::UuidOf(properties), uuid)) return gpu;
  }
  return -1;
}

absl::StatusOr<RegionOpener::Mapping> IpcOpener::Open(const SharedDeviceMemory& memory) {
  TRIBUTARY_ASSIGN_OR_RETURN(const int owner, FindGpu(memory.gpu));
  TRIBUTARY_RETURN_IF_ERROR(CheckReach(gpu_, owner, memory.gpu));
  cudaIpcMemHandle_t handle;
  static_assert(sizeof(handle) == CUDA_IPC_HANDLE_SIZE);
  std::memcpy(&handle, memory.handle.data(), sizeof(handle));
  void* base = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return OpenError(error);
  Mapping mapping{.base = static_cast<std::byte*>(base), .same_gpu = owner == gpu_};
  const absl::StatusOr<cuda::Allocation> allocation = cuda::FindAllocation(base);
  if (!allocation.ok()) {
    Close(mapping);
    return allocation.status();
  }
  mapping.bytes = allocation->bytes - static_cast<size_t>(mapping.base - allocation->base);
  return mapping;
}

void IpcOpener::Close(const Mapping& mapping) { (void)cudaIpcCloseMemHandle(mapping.base); }

}  // namespace tributary::worker
