// What a build without CUDA says.
#include "worker/cuda_backend.h"

namespace tributary::worker {
namespace {

absl::Status Missing() {
  return absl::FailedPreconditionError(
      "this build has no CUDA; configure with -DTRIBUTARY_CUDA=ON where a CUDA toolkit is");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions&) {
  return Missing();
}

absl::Status CheckGpuExchange(collective::Strategy, int, int) { return Missing(); }

absl::StatusOr<int> CountGpus() { return Missing(); }

absl::Status CheckGpus(int, int) { return Missing(); }

std::shared_ptr<const void> PinHostMemory(int, std::byte*, size_t) { return nullptr; }

void SetCudaEnvironment() {}

}  // namespace tributary::worker
