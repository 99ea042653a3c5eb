#include "worker/cuda/session/session_memory.h"

#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/cuda/lent_memory.h"
#include "base/status/status_macros.h"
#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

// CUDA shares whole allocations of this size with other processes, so nothing else may lie in one.
constexpr size_t kSharedUnit = size_t{2} << 20;

}  // namespace

absl::StatusOr<std::shared_ptr<SessionMemory>> SessionMemory::Take(
    CudaRank& rank, const OpenSessionCommand& command, int32_t ranks, int32_t own_rank) {
  std::shared_ptr<SessionMemory> memory(new SessionMemory(rank, ranks, own_rank));
  TRIBUTARY_RETURN_IF_ERROR(memory->TakeAll(command));
  return memory;
}

absl::Status SessionMemory::TakeAll(const OpenSessionCommand& command) {
  TRIBUTARY_CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  TRIBUTARY_CUDA_OK(cudaStreamCreateWithFlags(&control_, cudaStreamNonBlocking));
  TRIBUTARY_CUDA_OK(cudaEventCreateWithFlags(&rank_work_, cudaEventDisableTiming));
  TRIBUTARY_RETURN_IF_ERROR(pinned_.Reserve(sizeof(Pinned)));
  new (pinned_.data()) Pinned();
  // A unit more than the layout takes: kernels read padded rows behind the last one.
  mailbox_bytes_ = (command.layout.bytes / kSharedUnit + 2) * kSharedUnit;
  if (own_rank_ == 0) {
    const absl::Status taken =
        FromCuda("taking the mailbox", cudaMalloc(&mailbox_, mailbox_bytes_));
    if (!taken.ok()) {
      return absl::Status(
          taken.code(), absl::StrCat("a mailbox of ", mailbox_bytes_, " bytes: ", taken.message()));
    }
    lent_mailbox_ = cuda::LendMemory(mailbox_, [](void* mailbox) { cudaFree(mailbox); });
    TRIBUTARY_CUDA_OK(cudaMemsetAsync(mailbox_, 0, mailbox_bytes_, stream_));
  }
  counter_.emplace(stream_);
  TRIBUTARY_RETURN_IF_ERROR(counter_->ReserveZeroed(sizeof(mailbox::SessionCounter), stream_));
  if (own_rank_ > 0) {
    fetched_.emplace(stream_);
    TRIBUTARY_RETURN_IF_ERROR(fetched_->ReserveZeroed(command.layout.slot_bytes, stream_));
  }
  workspace_ = std::make_unique<CudaRank::Workspace>(stream_);
  plans_ = std::make_unique<SessionPlans>(stream_, command.max_steps + 1);
  TRIBUTARY_RETURN_IF_ERROR(plans_->Reserve());
  TRIBUTARY_CUDA_OK(cudaStreamSynchronize(stream_));
  return absl::OkStatus();
}

SessionMemory::~SessionMemory() {
  if (!rank_.Use().ok()) return;
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  graphs_.Forget();
  plans_.reset();
  workspace_.reset();
  counter_.reset();
  fetched_.reset();
  group_.reset();
  SayGone();
  if (control_ != nullptr) cudaStreamSynchronize(control_);
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  root_.reset();
  lent_mailbox_.reset();
  if (rank_work_ != nullptr) cudaEventDestroy(rank_work_);
  if (control_ != nullptr) cudaStreamDestroy(control_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status SessionMemory::FollowRank() {
  TRIBUTARY_CUDA_OK(cudaEventRecord(rank_work_, rank_.stream()));
  TRIBUTARY_CUDA_OK(cudaStreamWaitEvent(stream_, rank_work_));
  return absl::OkStatus();
}

absl::Status SessionMemory::WriteWord(size_t offset, const uint32_t& from) {
  if (mailbox() == nullptr) return absl::OkStatus();  // it was never shared
  TRIBUTARY_CUDA_OK(
      cudaMemcpyAsync(mailbox() + offset, &from, sizeof(from), cudaMemcpyHostToDevice, control_));
  return absl::OkStatus();
}

void SessionMemory::Share(std::unique_ptr<PeerMailbox> root,
                          std::unique_ptr<collective::DeviceGroup> group) {
  root_ = std::move(root);
  group_ = std::move(group);
}

void SessionMemory::SayGone() {
  if (root_ == nullptr) return;
  uint32_t* word = PeerWord(kGoneFromEnd) + own_rank_ * mailbox::kPeerWords;
  (void)cudaMemcpyAsync(word, &pinned_.as<Pinned>()->gone, sizeof(uint32_t), cudaMemcpyHostToDevice,
                        control_);
}

bool SessionMemory::PeersAreGone() {
  if (own_rank_ != 0 || group_ == nullptr) return true;
  auto& gone = pinned_.as<Pinned>()->gone_of_peers;
  if (!rank_.Use().ok() ||
      cudaMemcpyAsync(gone, PeerWord(kGoneFromEnd), sizeof(gone), cudaMemcpyDeviceToHost,
                      control_) != cudaSuccess ||
      cudaStreamSynchronize(control_) != cudaSuccess) {
    return false;
  }
  for (int32_t rank = 1; rank < ranks_; ++rank) {
    if (gone[rank * mailbox::kPeerWords] == 0) return false;
  }
  return true;
}

absl::Status SessionMemory::WriteStatus(const mailbox::Layout& layout, int32_t endpoints,
                                        uint32_t status) {
  uint32_t& word = pinned_.as<Pinned>()->status;
  word = status;
  for (int32_t e = 0; e < endpoints; ++e) {
    TRIBUTARY_RETURN_IF_ERROR(WriteWord(layout.OfEndpoint(e).status, word));
  }
  return absl::OkStatus();
}

absl::Status SessionMemory::EndStreamWaits(const mailbox::Layout& layout, int32_t endpoints) {
  const uint32_t& word = pinned_.as<Pinned>()->ends_waits;
  for (int32_t e = 0; e < endpoints; ++e) {
    const mailbox::Layout words = layout.OfEndpoint(e);
    // Those of layers, and those of round trips.
    for (const size_t offset :
         {words.handed_over, words.handed_back, words.service_sleeps, words.host_sleeps}) {
      TRIBUTARY_RETURN_IF_ERROR(WriteWord(offset, word));
    }
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
