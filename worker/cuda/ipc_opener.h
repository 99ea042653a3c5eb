// Memory that other processes share by CUDA IPC, mapped for one GPU.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "worker/opened_regions.h"

namespace tributary::worker {

// CUDA's ordinal in this process of the GPU with this UUID. -1: the process does not see it.
absl::StatusOr<int> FindGpu(const std::string& uuid);

// Callers of Open and Close have made the GPU their thread's (CudaRank::Use).
class IpcOpener final : public RegionOpener {
 public:
  // `gpu`: CUDA's ordinal in this process.
  explicit IpcOpener(int gpu) : gpu_(gpu) {}

  // The memory may lie on another GPU to which this one has peer access, which is then enabled.
  // kFailedPrecondition, cuda_ipc.device_uuid: this process does not see that GPU, or has
  // no peer access to it. kInvalidArgument, cuda_ipc.raw_handle: no such memory, or memory of this
  // very process.
  absl::StatusOr<Mapping> Open(const SharedDeviceMemory& memory) override;
  void Close(const Mapping& mapping) override;

 private:
  const int gpu_;
};

}  // namespace tributary::worker
