// What a session holds of a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mailbox/gate.h"
#include "collective/direct/direct_layout.h"
#include "collective/group/device_group.h"
#include "worker/command.h"
#include "worker/cuda/memory.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/session/session_group.h"
#include "worker/cuda/session/session_plans.h"
#include "worker/cuda/step_graphs.h"

namespace tributary::worker {

// Giving memory back to CUDA may wait for all kernels on the GPU, and with that for the hosts of
// other sessions. So whoever destroys this is a thread that may wait (SessionWatch::FreeLater).
class SessionMemory {
 public:
  // `ranks` ranks share the session. Rank 0 alone has the mailbox; the others are told of it by
  // Share. The memory is of the calling thread's device. kResourceExhausted: it has no room.
  static absl::StatusOr<std::shared_ptr<SessionMemory>> Take(CudaRank& rank,
                                                             const OpenSessionCommand& command,
                                                             int32_t ranks, int32_t own_rank);
  ~SessionMemory();
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  cudaStream_t stream() const { return stream_; }
  // Rank 0's mailbox.
  std::byte* mailbox() const { return root_ != nullptr ? root_->data() : mailbox_; }
  size_t mailbox_bytes() const { return mailbox_bytes_; }
  // On other ranks than rank 0: where the tensors of the layer under way are brought to, laid out
  // as a slot of the mailbox.
  std::byte* fetched() const { return fetched_->data(); }
  // Words in rank 0's memory, kPeerWords apart and rank 1's first: the layers of steps without
  // results that the other ranks have finished.
  uint32_t* finished_of_peers() const { return PeerWord(kFinishedFromEnd); }
  // The group in which the session's partials are exchanged. Null where the rank is alone.
  collective::DeviceGroup* group() const { return group_.get(); }
  // Where there are several ranks: gives it rank 0's mailbox (null on rank 0) and the group.
  void Share(std::unique_ptr<PeerMailbox> root, std::unique_ptr<collective::DeviceGroup> group);
  // Whether no other rank reaches the mailbox any more. It is asked before this is destroyed.
  bool PeersAreGone();
  mailbox::SessionCounter* counter() const { return counter_->as<mailbox::SessionCounter>(); }
  mailbox::SessionProgress* progress() const { return &pinned_.as<Pinned>()->progress; }
  CudaRank::Workspace& workspace() { return *workspace_; }
  SessionPlans& plans() { return *plans_; }
  StepGraphs& graphs() { return graphs_; }

  // What comes into the stream from now on comes behind what the rank's stream has been given.
  absl::Status FollowRank();
  // Writes the status words of so many endpoints, once. This and the next do not wait for what runs
  // or waits on the GPU. `layout` is endpoint 0's.
  absl::Status WriteStatus(const mailbox::Layout& layout, int32_t endpoints, uint32_t status);
  // Writes the words that streams of either side wait for, so that their waits end.
  absl::Status EndStreamWaits(const mailbox::Layout& layout, int32_t endpoints);

 private:
  struct Pinned {
    mailbox::SessionProgress progress;
    uint32_t status = 0;  // what WriteStatus writes
    uint32_t ends_waits = mailbox::kEndsWaits;
    uint32_t gone = 1;  // what SayGone writes
    uint32_t gone_of_peers[collective::kMaxDirectRanks * mailbox::kPeerWords] = {};
  };

  // Words of the ranks lie behind the mailbox, at these distances from the end of its memory.
  static constexpr size_t kFinishedFromEnd = 8192;
  static constexpr size_t kGoneFromEnd = 4096;

  SessionMemory(CudaRank& rank, int32_t ranks, int32_t own_rank)
      : rank_(rank), ranks_(ranks), own_rank_(own_rank) {}
  uint32_t* PeerWord(size_t from_end) const {
    return reinterpret_cast<uint32_t*>(mailbox() + mailbox_bytes_ - from_end);
  }
  // Tells rank 0 that this rank does not reach the mailbox any more.
  void SayGone();
  absl::Status WriteWord(size_t offset, const uint32_t& from);
  absl::Status TakeAll(const OpenSessionCommand& command);

  CudaRank& rank_;
  const int32_t ranks_;
  const int32_t own_rank_;
  std::unique_ptr<PeerMailbox> root_;  // null on rank 0
  std::unique_ptr<collective::DeviceGroup> group_;
  cudaStream_t stream_ = nullptr;   // steps run here
  cudaStream_t control_ = nullptr;  // status and ends of waits are written here
  cudaEvent_t rank_work_ = nullptr;
  std::byte* mailbox_ = nullptr;
  std::shared_ptr<void> lent_mailbox_;  // a host of this process shares it
  size_t mailbox_bytes_ = 0;
  PinnedMemory pinned_;
  std::optional<DeviceMemory> counter_;
  std::optional<DeviceMemory> fetched_;
  std::unique_ptr<CudaRank::Workspace> workspace_;
  std::unique_ptr<SessionPlans> plans_;
  StepGraphs graphs_;
};

}  // namespace tributary::worker
