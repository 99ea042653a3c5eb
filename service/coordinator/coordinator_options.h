// Settings of a coordinator.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "service/journal/journal.h"
#include "service/observe/observer.h"
#include "service/schedule/batcher.h"
#include "service/schedule/client_quota.h"
#include "worker/backends.h"

namespace tributary::service {

struct SessionLimits {
  int64_t sessions = 256;                      // that are open at once
  uint64_t mailbox_bytes = uint64_t{8} << 30;  // of all their mailboxes together
  // How long a session waits with eyes open for a host that writes to shared memory, before it
  // sleeps.
  std::chrono::nanoseconds spin{std::chrono::microseconds(50)};
  // How long a host may take to time round trips (SessionProbe) before it loses its session.
  std::chrono::milliseconds probe_patience{10'000};
};

struct CoordinatorOptions {
  // Of the program (base/process/version.h): what GetTopologyReply.version says.
  std::string build_version = "unknown";
  BatchLimits batch;
  // How many steps the workers are given at a time. With 2, the next step is ready when they finish
  // one.
  int pipeline_depth = 2;
  std::chrono::milliseconds step_timeout{30'000};
  // For how long a short call that has come makes longer ones take turns (TurnLength), and a caller
  // with few calls at a time those who have many (CallerShare); 0: not at all.
  std::chrono::milliseconds turn_memory{20};
  // No call waits longer than this, whatever its own deadline is.
  std::chrono::milliseconds max_call_timeout{300'000};
  // After what delay callers are asked to retry on UNAVAILABLE and ABORTED.
  std::chrono::milliseconds retry_delay{200};
  size_t max_message_bytes = size_t{64} << 20;
  // Of the queries, results and new tokens of a step, in f32.
  int64_t max_step_bytes = int64_t{512} << 20;
  int32_t max_sequences = 65'536;  // of one cache
  ClientLimits client_limits;      // what each caller may hold
  SessionLimits session_limits;
  // Asks backends for results that do not depend on what shares a step.
  bool deterministic = false;
  // The backends that a cache's backend is chosen from, in order of preference. They live as long
  // as the process.
  std::vector<const worker::BackendCapabilities*> backends{worker::RegisteredBackends().begin(),
                                                           worker::RegisteredBackends().end()};
  // POSIX objects whose keys begin with one of these may be registered. Empty: none.
  std::vector<std::string> shared_memory_prefixes;
  // How often it is looked whether the owners of registered regions live.
  std::chrono::milliseconds region_sweep{1'000};
  // How long a lease holds when nobody presents it; 0: for ever.
  std::chrono::milliseconds lease_timeout{600'000};
  // CacheSpec.replicas of caches that do not state them.
  int32_t replicas = 0;
  // Called when the service becomes able to serve and when it ceases to be; may be empty.
  std::function<void(bool ready)> on_readiness;
  // Measures, records and traces calls and steps. Null: nobody does.
  std::shared_ptr<Observer> observer;
  // What outlives the process. Null: nothing does.
  std::shared_ptr<Journal> journal;
};

}  // namespace tributary::service
