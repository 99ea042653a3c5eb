#include "worker/cuda/rank.h"

#include <chrono>
#include <thread>

#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;

// A step is over in less, as a rule; what takes longer does not notice a late answer.
constexpr std::chrono::microseconds kSpin{500};
constexpr std::chrono::microseconds kNap{20};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRank>> CudaRank::Open(const CudaBackendOptions& options) {
  TRIBUTARY_RETURN_IF_ERROR(CheckGpus(options.gpu, 1));
  std::unique_ptr<CudaRank> rank(new CudaRank(options));
  TRIBUTARY_RETURN_IF_ERROR(rank->Use());
  TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::QueryDevice(options.gpu, &rank->plan_options_.device)));
  rank->plan_options_.kernels = {.portable = options.portable,
                                 .batch_invariant = options.batch_invariant};
  TRIBUTARY_CUDA_OK(cudaStreamCreateWithFlags(&rank->stream_, cudaStreamNonBlocking));
  return rank;
}

CudaRank::~CudaRank() {
  // What may still be running works on memory that is about to go.
  if (stream_ == nullptr || !Use().ok()) return;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

absl::Status CudaRank::Use() const {
  TRIBUTARY_CUDA_OK(cudaSetDevice(options_.gpu));
  return absl::OkStatus();
}

size_t CudaRank::FreeMemory() const {
  size_t free = 0;
  size_t total = 0;
  if (!Use().ok() || cudaMemGetInfo(&free, &total) != cudaSuccess) return 0;
  return free;
}

absl::Status CudaRank::Await(collective::Deadline deadline) const {
  const Clock::time_point begin = Clock::now();
  while (true) {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaSuccess) return absl::OkStatus();
    if (error != cudaErrorNotReady) return FromCuda("a kernel or copy of the step", error);
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return absl::DeadlineExceededError("the GPU was not through with the step by its deadline");
    }
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
}

absl::Status CudaRank::BeginStep(collective::Deadline deadline) {
  if (unfinished_) TRIBUTARY_RETURN_IF_ERROR(Await(deadline));
  unfinished_ = true;
  return absl::OkStatus();
}

}  // namespace tributary::worker
