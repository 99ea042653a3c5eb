// What a session holds of a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mailbox/gate.h"
#include "worker/command.h"
#include "worker/cuda/memory.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/session/session_plans.h"
#include "worker/cuda/step_graphs.h"

namespace tributary::worker {

// Giving memory back to CUDA may wait for all kernels on the GPU, and with that for the hosts of
// other sessions. So whoever destroys this is a thread that may wait (SessionWatch::FreeLater).
class SessionMemory {
 public:
  // kResourceExhausted: no room. The device is the calling thread's.
  static absl::StatusOr<std::shared_ptr<SessionMemory>> Take(CudaRank& rank,
                                                             const OpenSessionCommand& command);
  ~SessionMemory();
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  cudaStream_t stream() const { return stream_; }
  std::byte* mailbox() const { return mailbox_; }
  size_t mailbox_bytes() const { return mailbox_bytes_; }
  mailbox::SessionCounter* counter() const { return counter_->as<mailbox::SessionCounter>(); }
  mailbox::SessionProgress* progress() const { return &pinned_.as<Pinned>()->progress; }
  CudaRank::Workspace& workspace() { return *workspace_; }
  SessionPlans& plans() { return *plans_; }
  StepGraphs& graphs() { return graphs_; }

  // What comes into the stream from now on comes behind what the rank's stream has been given.
  absl::Status FollowRank();
  // Writes a word of the mailbox beside all that runs or waits.
  absl::Status WriteWord(size_t offset, uint32_t value);

 private:
  struct Pinned {
    mailbox::SessionProgress progress;
    uint32_t word = 0;  // what WriteWord writes
  };

  explicit SessionMemory(CudaRank& rank) : rank_(rank) {}
  absl::Status TakeAll(const OpenSessionCommand& command);

  CudaRank& rank_;
  cudaStream_t stream_ = nullptr;   // of the steps
  cudaStream_t control_ = nullptr;  // of WriteWord
  cudaEvent_t rank_work_ = nullptr;
  std::byte* mailbox_ = nullptr;
  size_t mailbox_bytes_ = 0;
  PinnedMemory pinned_;
  std::optional<DeviceMemory> counter_;
  std::unique_ptr<CudaRank::Workspace> workspace_;
  std::unique_ptr<SessionPlans> plans_;
  StepGraphs graphs_;
};

}  // namespace tributary::worker
