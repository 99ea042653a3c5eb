// What a worker process does: it dials the coordinator, executes what it is told, and dials again
// when the stream ends.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/rpc/channel_security.h"
#include "base/sync/mutex.h"
#include "worker/rpc/rank_thread.h"
#include "worker/rpc/readiness.h"
#include "worker/rpc/session.h"

namespace tributary::worker {

struct WorkerOptions {
  SessionOptions session;
  std::string coordinator;  // "host:port" or "unix:/path"
  ChannelSecurity security;
  RankOptions rank;  // threads: >= 1; memory_limit: 0 for the device's
  // The pause between attempts to reach the coordinator begins with the first and doubles up to the
  // second.
  std::chrono::milliseconds reconnect_min{100};
  std::chrono::milliseconds reconnect_max{5'000};
  // How long the worker waits for the coordinator to agree to its leaving.
  std::chrono::milliseconds drain_timeout{10'000};
  // The limit of one message in either direction. It is at least the coordinator's.
  // How long shards are kept while no coordinator is there that knows of them.
  std::chrono::milliseconds orphan_timeout{600'000};
  size_t max_message_bytes = size_t{1} << 30;
  std::function<void(bool ready)> on_ready;  // see Readiness; session.observer is told, too
};

// The pause before repetition `attempt`, counted from 0. It lies between 1/2 and 1 times the
// doubled pause, by `random` in [0, 1), so that workers that lost one coordinator do not return in
// step.
std::chrono::milliseconds ReconnectPause(const WorkerOptions& options, int attempt, double random);

class Worker {
 public:
  explicit Worker(WorkerOptions options);

  // Serves until it is drained, and returns OK then. kFailedPrecondition: the coordinator refuses
  // this worker for a reason that no waiting heals. kDataLoss: the device failed, and only another
  // process may start anew.
  absl::Status Run();

  // Makes Run return once what is in flight is done. May be called from any thread, but not from a
  // signal handler.
  void Drain();
  // The bytes that shards hold. May be called from any thread.
  uint64_t shard_bytes() const { return rank_.memory_bytes(); }

 private:
  // Null when the worker drains: no session begins any more.
  std::shared_ptr<Session> BeginSession();
  void ForgetShards();
  // Forgets the shards if the last session in which somebody counted on them is too long ago.
  void ForgetOrphans(std::chrono::steady_clock::time_point last_welcome);
  void Lose(const absl::Status& why);
  // Ends early when the worker drains.
  void Pause(std::chrono::milliseconds duration);
  void Log(telemetry::LogLevel level, const std::string& event) const;
  // How a session ended.
  void LogEnd(const Session::End& end, bool refused) const;

  const WorkerOptions options_;
  Identity identity_;
  Readiness readiness_;

  Mutex mutex_;
  CondVar changed_;
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  absl::Status lost_ TRIBUTARY_GUARDED_BY(mutex_);
  std::shared_ptr<Session> session_ TRIBUTARY_GUARDED_BY(mutex_);
  RankThread rank_;  // last, so that it ends first: it calls Lose
};

}  // namespace tributary::worker
