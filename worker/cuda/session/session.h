// A session on the GPU of a rank: its mailbox, its stream, and the steps that were enqueued ahead.
//
// A step's layers lie in the stream one after the other, each behind a gate (base/mailbox/gate.h)
// that its doorbell opens. No call of the host, no lock and no allocation stands between two
// layers. A step that resembles one before is launched as one CUDA graph.
//
// Where several ranks share a session, each has a stream of its own. The one mailbox is rank 0's.
// The gates of all look at its doorbells, and the others bring queries and tokens to their own
// memory first. Rank 0 writes the merged result and rings.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mailbox/gate.h"
#include "base/sync/mutex.h"
#include "worker/backend.h"
#include "worker/command.h"
#include "worker/cuda/operations/operations.h"
#include "worker/cuda/rank.h"
#include "worker/cuda/session/gate_kernel.h"
#include "worker/cuda/session/session_memory.h"
#include "worker/cuda/session/watch.h"

namespace tributary::worker {

class CudaSession final : public DeviceSession {
 public:
  // As Backend::OpenSession. `rank` and `watch` outlive the session.
  static absl::StatusOr<std::unique_ptr<CudaSession>> Open(CudaRank& rank, SessionWatch& watch,
                                                           const OpenSessionCommand& command,
                                                           collective::Communicator& comm,
                                                           collective::Deadline deadline,
                                                           OnSessionNews news);
  ~CudaSession() override;

  const DeviceMailbox& mailbox() const override { return mailbox_; }
  SlotTensors TensorsOf(const LayerGeometry& geometry, uint32_t count, int32_t rows,
                        int32_t tokens) const override;
  absl::Status CopyPages(Shard& shard, const std::vector<PageCopy>& copies) override;
  absl::Status Enqueue(std::span<const PlannedStep> layers, std::span<Shard* const> shards,
                       uint32_t first_count, Waiting waiting) override;
  void End(int32_t status) override;

 private:
  // A layer of the step that is being enqueued.
  struct Layer;
  // A step that repeats tokens, and where the GPU says which of its entries differ.
  struct Repeat {
    uint32_t first_count = 0;
    int32_t layers = 0;
    int32_t entries = 0;
    std::shared_ptr<PinnedMemory> differs;  // [layers, entries] of uint32

    uint32_t end() const { return first_count + static_cast<uint32_t>(layers); }
  };

  CudaSession(CudaRank& rank, SessionWatch& watch, const OpenSessionCommand& command, int32_t ranks,
              int32_t own_rank)
      : rank_(rank),
        watch_(watch),
        command_(command),
        ranks_(ranks),
        own_rank_(own_rank),
        early_launch_(
            cuda::FeaturesOf(rank.plan_options().device.compute_capability).early_launch) {}

  // Takes this rank's memory, and on rank 0 the mailbox.
  absl::Status TakeMemory();
  // The same where there are several ranks: all of them take memory and share it, or all fail.
  absl::Status MeetOthers(collective::Communicator& comm, collective::Deadline deadline);
  absl::Status Describe();
  // `answers`: AnswerProbe follows.
  void Watch(OnSessionNews news, bool answers);
  // Puts the launches that answer the host's round trips into the stream.
  absl::Status AnswerProbe();
  // Ends the session when the host has handed nothing over for too long. The watch calls this now
  // and then where the stream waits, because such a wait has no bound of its own.
  void EndIfHostIsSilent();
  uint32_t* Word(size_t offset) const {
    return reinterpret_cast<uint32_t*>(memory_->mailbox() + offset);
  }
  mailbox::SharedGate GateOf(int32_t layer, int32_t layers, bool has_results) const;
  CudaPlace PlaceOf(const PlannedStep& step, const DevicePlan& plan,
                    const mailbox::SharedGate& gate, uint32_t count) const;
  // On other ranks than rank 0: what passes the gate and brings the layer here.
  FetchArgs FetchOf(const PlannedStep& step, const DevicePlan& plan,
                    const mailbox::SharedGate& gate) const;
  absl::Status Prepare(std::span<const PlannedStep> steps, std::span<Shard* const> shards,
                       uint32_t first_count, std::deque<Layer>* layers);
  // Puts all layers into the stream, one launch at a time.
  absl::Status Launch(std::deque<Layer>& layers);
  absl::Status LaunchLayer(Layer& layer);
  // The same as one graph, when the step resembles one before.
  absl::Status LaunchGraph(std::deque<Layer>& layers);
  // How far the session's stream is, as cudaStreamQuery says it; for the watch's thread.
  cudaError_t StateOfStream();
  // Takes memory for the differences that a step finds which repeats tokens.
  absl::Status ExpectDifferences(uint32_t first_count, std::deque<Layer>* layers);
  // Adds the conflicts of repeats that have ended.
  void AddConflicts(SessionNews* news);
  // Memory of a repeat that has ended, or new memory: none is given back while the session goes on.
  std::shared_ptr<PinnedMemory> TakeSpare();

  CudaRank& rank_;
  SessionWatch& watch_;
  const OpenSessionCommand command_;
  const int32_t ranks_;
  const int32_t own_rank_;
  const bool early_launch_;
  // Released when nothing of the session runs any more; then the watch frees it.
  std::shared_ptr<SessionMemory> memory_;
  DeviceMailbox mailbox_;  // rank 0's
  bool watched_ = false;
  std::atomic<bool> probe_launched_ = false;  // all of AnswerProbe is in the stream
  bool graphs_work_ = true;
  Waiting waiting_ = Waiting::kSpinningWarp;  // how the step waits that is being enqueued

  // Held while the stream is captured. A query meanwhile would be an error, and end the capture.
  Mutex capture_;

  Mutex mutex_;
  bool ended_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::deque<Repeat> repeats_ TRIBUTARY_GUARDED_BY(mutex_);  // not yet told of
  std::vector<std::shared_ptr<PinnedMemory>> spare_ TRIBUTARY_GUARDED_BY(mutex_);
  // For EndIfHostIsSilent: whether the stream waits, the end of the layers that were enqueued, the
  // layers that the host has handed over, and since when there are so many.
  bool stream_waits_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  uint32_t expected_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  uint32_t seen_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  std::chrono::steady_clock::time_point seen_since_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::worker
