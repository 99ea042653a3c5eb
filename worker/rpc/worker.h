// A worker process without its main(): dials the coordinator, executes what it is told, dials
// again.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/rpc/channel_security.h"
#include "worker/rpc/rank_thread.h"
#include "worker/rpc/readiness.h"
#include "worker/rpc/session.h"

namespace tributary::worker {

struct WorkerOptions {
  SessionOptions session;
  std::string coordinator;  // "host:port" or "unix:/path"
  ChannelSecurity security;
  RankOptions rank;  // threads: >= 1; memory_limit: 0 for the device's
  // Between attempts to reach the coordinator: the first pause, which then grows up to the second.
  std::chrono::milliseconds reconnect_min{100};
  std::chrono::milliseconds reconnect_max{5'000};
  // A coordinator that does not agree to the worker's leaving is not waited for longer.
  std::chrono::milliseconds drain_timeout{10'000};
  // Of one message either way; at least the coordinator's.
  size_t max_message_bytes = size_t{1} << 30;
  std::function<void(bool ready)> on_ready;  // as Readiness; session.observer is told too
};

// The pause before attempt `attempt` (0: the first repetition), between 1/2 and 1 times the doubled
// pause; `random` in [0, 1). So workers that lost one coordinator do not come back in step.
std::chrono::milliseconds ReconnectPause(const WorkerOptions& options, int attempt, double random);

class Worker {
 public:
  explicit Worker(WorkerOptions options);

  // Serves until drained: OK. kFailedPrecondition when the coordinator refuses this worker for a
  // reason that no waiting heals. kDataLoss when the device failed: another process may start anew.
  absl::Status Run();

  // Leaves once what is in flight is done. From any thread, but not from a signal handler.
  void Drain();
  // Held by shards. From any thread.
  uint64_t shard_bytes() const { return rank_.memory_bytes(); }

 private:
  // Null once draining: there is nothing to begin any more.
  std::shared_ptr<Session> BeginSession();
  void ForgetShards();
  void Lose(const absl::Status& why);
  // Ends early when draining.
  void Pause(std::chrono::milliseconds duration);
  void Log(telemetry::LogLevel level, const std::string& event) const;

  const WorkerOptions options_;
  Identity identity_;
  Readiness readiness_;

  absl::Mutex mutex_;
  absl::CondVar changed_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Session> session_ ABSL_GUARDED_BY(mutex_);
  RankThread rank_;  // last, so that it ends first: it calls Lose
};

}  // namespace tributary::worker
