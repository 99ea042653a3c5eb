#include "worker/cuda/rank.h"

#include <chrono>
#include <thread>
#include <utility>

#include "worker/cuda/device_group.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;

// A step is over in less, as a rule; what takes longer does not notice a late answer.
constexpr std::chrono::microseconds kSpin{500};
constexpr std::chrono::microseconds kNap{20};
// For kernels of a group that was told to stop.
constexpr std::chrono::seconds kGrace{5};
constexpr std::chrono::milliseconds kMoment{500};

// Memory that a stream gives back is not given to another stream before the first one has come so
// far. As CUDA does it otherwise, the second stream waits for the first, and that may wait for the
// host of a session.
absl::Status KeepStreamsApart(int gpu) {
  cudaMemPool_t pool = nullptr;
  TRIBUTARY_CUDA_OK(cudaDeviceGetDefaultMemPool(&pool, gpu));
  int no = 0;
  TRIBUTARY_CUDA_OK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no));
  return absl::OkStatus();
}

absl::Status AwaitStream(cudaStream_t stream, collective::Deadline deadline) {
  const Clock::time_point begin = Clock::now();
  while (true) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaSuccess) return absl::OkStatus();
    if (error != cudaErrorNotReady) return FromCuda("a kernel or copy of the step", error);
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      return absl::DeadlineExceededError("the GPU was not through with the step by its deadline");
    }
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaRank>> CudaRank::Open(const CudaBackendOptions& options) {
  TRIBUTARY_RETURN_IF_ERROR(CheckGpus(options.gpu, 1));
  std::unique_ptr<CudaRank> rank(new CudaRank(options));
  TRIBUTARY_RETURN_IF_ERROR(rank->Use());
  TRIBUTARY_RETURN_IF_ERROR(ToAbsl(cuda::QueryDevice(options.gpu, &rank->plan_options_.device)));
  rank->plan_options_.kernels = {.portable = options.portable,
                                 .batch_invariant = options.batch_invariant};
  TRIBUTARY_RETURN_IF_ERROR(KeepStreamsApart(options.gpu));
  TRIBUTARY_CUDA_OK(cudaStreamCreateWithFlags(&rank->stream_, cudaStreamNonBlocking));
  TRIBUTARY_CUDA_OK(cudaStreamCreateWithFlags(&rank->beside_, cudaStreamNonBlocking));
  for (cudaEvent_t* event : {&rank->parted_, &rank->joined_}) {
    TRIBUTARY_CUDA_OK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  rank->workspace_ = std::make_unique<Workspace>(rank->stream_);
  return rank;
}

CudaRank::Workspace::Workspace(cudaStream_t stream)
    : q(stream),
      k(stream),
      v(stream),
      pass_o(stream),
      pass_lse(stream),
      arriving(stream),
      slice_o(stream),
      slice_lse(stream),
      context_o(stream),
      context_lse(stream),
      result_o(stream),
      result_lse(stream),
      converted(stream),
      split_o(stream),
      split_lse(stream),
      gathered_q(stream),
      gathered_o(stream),
      gathered_lse(stream),
      arrivals(stream),
      differs(stream),
      run_slots(stream),
      prefill(stream),
      k16(stream),
      v16(stream) {}

CudaRank::~CudaRank() {
  // What may still be running works on memory that is about to go.
  if (stream_ == nullptr || !Use().ok()) return;
  Leave();
  // Peers that leave too are through with this rank's memory in a moment; what others still reach
  // stays until the process ends.
  const Clock::time_point moment = Clock::now() + kMoment;
  while (retired_->Sweep() > 0 && Clock::now() < moment) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (beside_ != nullptr) cudaStreamSynchronize(beside_);
  workspace_.reset();  // in the stream's order
  cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : {parted_, joined_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (beside_ != nullptr) cudaStreamDestroy(beside_);
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

absl::StatusOr<std::unique_ptr<collective::Communicator>> CudaRank::Join(
    std::unique_ptr<collective::Communicator> comm, collective::Rendezvous& rendezvous,
    collective::Deadline deadline) {
  TRIBUTARY_RETURN_IF_ERROR(Use());
  Leave();
  if (options_.exchange == ExchangePlace::kHost) return comm;
  TRIBUTARY_ASSIGN_OR_RETURN(
      FormedDeviceGroup formed,
      FormDeviceGroup({.gpu = options_.gpu, .strategy = options_.strategy, .retired = retired_},
                      *comm, rendezvous, deadline));
  if (formed.how != told_ && options_.on_exchange) options_.on_exchange(formed.how);
  told_ = std::move(formed.how);
  if (formed.group == nullptr) return comm;
  group_ = std::move(formed.group);
  return AbortTogether(std::move(comm), group_);
}

// Graphs go before the group whose exchange they captured, and both after the stream has drained.
void CudaRank::Leave() {
  if (group_ == nullptr || !Use().ok()) return;
  const Clock::time_point grace = Clock::now() + kGrace;
  cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaErrorNotReady) group_->Abort("the epoch is over");
  while (state == cudaErrorNotReady && Clock::now() < grace) {
    std::this_thread::sleep_for(kNap);
    state = cudaStreamQuery(stream_);
  }
  if (state == cudaErrorNotReady) {
    // A GPU that does not end what it was told to end keeps what it works on.
    new std::shared_ptr<collective::DeviceGroup>(std::move(group_));
    return;
  }
  graphs_.Forget();
  group_.reset();
}

absl::Status CudaRank::Await(collective::Deadline deadline) const {
  if (group_ != nullptr) {
    const tributary::Status status = group_->Await(stream_, deadline);
    if (status.ok()) return absl::OkStatus();
    // Whether the group broke or the GPU did.
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error != cudaSuccess && error != cudaErrorNotReady) {
      const absl::Status failed = FromCuda("a kernel or copy of the step", error);
      if (absl::IsDataLoss(failed)) return failed;
    }
    return CollectiveStatus(status);
  }
  return AwaitStream(stream_, deadline);
}

absl::Status CudaRank::AwaitBeside(collective::Deadline deadline) const {
  return AwaitStream(beside_, deadline);
}

absl::Status CudaRank::PartBeside(cudaStream_t stream) const {
  TRIBUTARY_CUDA_OK(cudaEventRecord(parted_, stream));
  return absl::OkStatus();
}

absl::Status CudaRank::EnterBeside() const {
  TRIBUTARY_CUDA_OK(cudaStreamWaitEvent(beside_, parted_));
  return absl::OkStatus();
}

absl::Status CudaRank::JoinBeside(cudaStream_t stream) const {
  TRIBUTARY_CUDA_OK(cudaEventRecord(joined_, beside_));
  TRIBUTARY_CUDA_OK(cudaStreamWaitEvent(stream, joined_));
  return absl::OkStatus();
}

absl::Status CudaRank::OpenRegion(RegionId region, const SharedDeviceMemory& memory) {
  TRIBUTARY_RETURN_IF_ERROR(Use());
  return regions_.Open(region, memory);
}

absl::Status CudaRank::CloseRegion(RegionId region, collective::Deadline deadline) {
  TRIBUTARY_RETURN_IF_ERROR(Use());
  if (unfinished_) TRIBUTARY_RETURN_IF_ERROR(Await(deadline));
  unfinished_ = false;
  regions_.Close(region);
  return absl::OkStatus();
}

absl::Status CudaRank::BeginStep(collective::Deadline deadline) {
  if (unfinished_) {
    TRIBUTARY_RETURN_IF_ERROR(Await(deadline));
    TRIBUTARY_RETURN_IF_ERROR(AwaitBeside(deadline));
  }
  unfinished_ = true;
  return absl::OkStatus();
}

}  // namespace tributary::worker
