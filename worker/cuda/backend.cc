#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "collective/direct/direct_layout.h"
#include "collective/direct/peer_access.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/rank_backend.h"
#include "worker/cuda/status.h"
#include "worker/cuda_backend.h"
#include "worker/status_conversion.h"

namespace tributary::worker {

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options) {
  TRIBUTARY_ASSIGN_OR_RETURN(std::unique_ptr<CudaRank> rank, CudaRank::Open(options));
  return std::make_unique<CudaRankBackend>(std::move(rank));
}

std::shared_ptr<const void> PinHostMemory(int gpu, std::byte* data, size_t bytes) {
  if (cudaSetDevice(gpu) != cudaSuccess ||
      cudaHostRegister(data, bytes, cudaHostRegisterPortable) != cudaSuccess) {
    cudaGetLastError();  // it concerns nobody else
    return nullptr;
  }
  // CUDA waits for copies that are under way before it lets go of the memory.
  return {data, [gpu](const std::byte* pinned) {
            if (cudaSetDevice(gpu) != cudaSuccess) return;
            cudaHostUnregister(const_cast<std::byte*>(pinned));
          }};
}

absl::StatusOr<int> CountGpus() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) return 0;
  TRIBUTARY_RETURN_IF_ERROR(FromCuda("looking for GPUs", error));
  return count;
}

absl::Status CheckGpus(int first, int count) {
  TRIBUTARY_ASSIGN_OR_RETURN(const int gpus, CountGpus());
  if (first < 0 || first + count > gpus) {
    return absl::FailedPreconditionError(absl::StrCat("GPUs ", first, " to ", first + count - 1,
                                                      " are wanted, this machine has ", gpus));
  }
  for (int gpu = first; gpu < first + count; ++gpu) {
    cuda::DeviceProperties device;
    TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::QueryDevice(gpu, &device)));
    if (device.compute_capability < CudaBackend().least_compute_capability) {
      return absl::FailedPreconditionError(absl::StrCat(
          "GPU ", gpu, " has compute capability ", device.compute_capability / 10, ".",
          device.compute_capability % 10, "; the cuda backend needs ", CudaBackend().arch));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGpuExchange(collective::Strategy strategy, int first, int count) {
  if (strategy != collective::Strategy::kDirect || count == 1) return absl::OkStatus();
  std::vector<collective::PeerIdentity> peers(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    TRIBUTARY_RETURN_IF_ERROR(
        ToAbsl(collective::DescribeSelf(first + i, &peers[static_cast<size_t>(i)])));
  }
  for (int i = 0; i < count; ++i) {
    const std::string reason = collective::WhyNoDirectAccess(
        peers, i, collective::kMaxDirectRanks,
        [&](const std::string& gpu) { return collective::WhyGpuIsOutOfReach(first + i, gpu); });
    if (reason.empty()) continue;
    return absl::FailedPreconditionError(absl::StrCat("exchange: direct is not there: GPU ",
                                                      first + i, " as rank ", i, ": ", reason));
  }
  return absl::OkStatus();
}

void SetCudaEnvironment() {
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
}

}  // namespace tributary::worker
