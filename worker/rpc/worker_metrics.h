// A worker process's own metrics. Names and meanings: docs/metrics.md.
#pragma once

#include <prometheus/collectable.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/telemetry/histogram.h"
#include "base/telemetry/trace.h"
#include "worker/rpc/worker_observer.h"

namespace tributary::worker {

class WorkerMetrics final : public WorkerObserver, public prometheus::Collectable {
 public:
  // Spans of traced steps go to `spans`; null: nowhere.
  explicit WorkerMetrics(std::shared_ptr<telemetry::TraceBuffer> spans = nullptr)
      : spans_(std::move(spans)) {}

  void OnWelcome(int rank, int size) override { rank_ = rank, size_ = size; }
  void OnJoined(uint64_t epoch, const absl::Status& status) override;
  void OnReady(bool ready) override { ready_ = ready; }
  void OnExecuted(const Command& command, const Reply& reply, Clock::time_point begin,
                  Clock::time_point end) override;
  std::vector<prometheus::MetricFamily> Collect() const override;

  // Collect calls this to learn how many bytes the shards hold.
  void set_shard_bytes(std::function<uint64_t()> shard_bytes) {
    shard_bytes_ = std::move(shard_bytes);
  }

 private:
  void Trace(const Command& command, const Reply& reply, Clock::time_point begin,
             Clock::time_point end);

  const std::shared_ptr<telemetry::TraceBuffer> spans_;
  std::atomic<int> rank_ = -1;
  std::atomic<int> size_ = 0;
  std::atomic<uint64_t> epoch_ = 0;
  std::atomic<bool> ready_ = false;
  std::function<uint64_t()> shard_bytes_;

  telemetry::Counter joined_, not_joined_;
  telemetry::Counter steps_done_, steps_failed_;
  telemetry::Histogram step_seconds_{telemetry::LatencyBounds()};
  telemetry::Histogram plan_{telemetry::LatencyBounds()};
  telemetry::Histogram append_{telemetry::LatencyBounds()};
  telemetry::Histogram attend_{telemetry::LatencyBounds()};
  telemetry::Histogram exchange_{telemetry::LatencyBounds()};
};

}  // namespace tributary::worker
