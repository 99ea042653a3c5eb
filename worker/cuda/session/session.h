// A session on a GPU that is a rank on its own: its mailbox, its stream, and the steps that were
// enqueued ahead.
//
// A step's layers lie in the stream one after the other, each behind a gate (base/mailbox/gate.h)
// that its doorbell opens. No call of the host, no lock and no allocation stands between two
// layers. A step that resembles one before is launched as one CUDA graph.
#pragma once

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
#include "worker/cuda/session/session_memory.h"
#include "worker/cuda/session/watch.h"

namespace tributary::worker {

class CudaSession final : public DeviceSession {
 public:
  // As Backend::OpenSession. `rank` and `watch` outlive the session.
  static absl::StatusOr<std::unique_ptr<CudaSession>> Open(CudaRank& rank, SessionWatch& watch,
                                                           const OpenSessionCommand& command,
                                                           OnSessionNews news);
  ~CudaSession() override;

  const DeviceMailbox& mailbox() const override { return mailbox_; }
  SlotTensors TensorsOf(const LayerGeometry& geometry, uint32_t count, int32_t rows,
                        int32_t tokens) const override;
  absl::Status CopyPages(Shard& shard, const std::vector<PageCopy>& copies) override;
  absl::Status Enqueue(std::span<const PlannedStep> layers, std::span<Shard* const> shards,
                       uint32_t first_count) override;
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

  CudaSession(CudaRank& rank, SessionWatch& watch, const OpenSessionCommand& command)
      : rank_(rank),
        watch_(watch),
        command_(command),
        early_launch_(
            cuda::FeaturesOf(rank.plan_options().device.compute_capability).early_launch) {}

  absl::Status Describe();
  void Watch(OnSessionNews news);
  mailbox::Gate GateOf(int32_t layer, int32_t layers) const;
  CudaPlace PlaceOf(const PlannedStep& step, const DevicePlan& plan, const mailbox::Gate& gate,
                    uint32_t count) const;
  absl::Status Prepare(std::span<const PlannedStep> steps, std::span<Shard* const> shards,
                       uint32_t first_count, std::deque<Layer>* layers);
  // Puts all layers into the stream, one launch at a time.
  absl::Status Launch(std::deque<Layer>& layers);
  absl::Status LaunchLayer(Layer& layer);
  // The same as one graph, when the step resembles one before.
  absl::Status LaunchGraph(std::deque<Layer>& layers);
  // Where the step repeats tokens: memory for what comes of it.
  absl::Status ExpectDifferences(uint32_t first_count, std::deque<Layer>* layers);
  // Adds what came of the repeats that have ended.
  void AddConflicts(SessionNews* news);

  CudaRank& rank_;
  SessionWatch& watch_;
  const OpenSessionCommand command_;
  const bool early_launch_;
  // Goes when nothing of the session runs any more; then the watch frees it.
  std::shared_ptr<SessionMemory> memory_;
  DeviceMailbox mailbox_;
  bool watched_ = false;
  bool graphs_work_ = true;

  Mutex mutex_;
  bool ended_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::deque<Repeat> repeats_ TRIBUTARY_GUARDED_BY(mutex_);  // not yet told of
};

}  // namespace tributary::worker
