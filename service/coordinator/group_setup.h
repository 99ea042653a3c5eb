// What the coordinator does when its group of workers breaks and forms again.
//
// A group that has formed is brought, in one round of commands, to what the coordinator knows:
// caches, tables, what was dropped meanwhile. When all of them are answered the service is ready.
// If the workers refuse a command, the round is begun again after a pause.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/telemetry/log.h"
#include "service/coordinator/cache_registry.h"
#include "service/coordinator/call_order.h"
#include "service/coordinator/coordinator_options.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/group_commands.h"
#include "service/coordinator/registered_regions.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/sessions.h"
#include "service/observe/observer.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

class GroupSetup final : public GroupObserver {
 public:
  // All of them outlive this.
  GroupSetup(const CoordinatorOptions& options, const telemetry::Logger& log, Observer& observer,
             CoordinatorLock& lock, ServingState& serving, GroupCommands& commands,
             CallOrder& order, CacheRegistry& caches, RegisteredRegions& regions,
             Sessions& sessions);

  // The group calls these from its own thread, one at a time.
  void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) override TRIBUTARY_UNLOCKED;
  void OnBroken(const std::string& reason) override TRIBUTARY_UNLOCKED;
  void OnSessionNews(const worker::SessionNews& news) override TRIBUTARY_UNLOCKED {
    sessions_.OnNews(news);
  }

  // Begins a round again if its time has come.
  void RetryIfDue(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;
  // When that is, or max().
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED {
    return retry_at_.value_or(CoordinatorLock::Clock::time_point::max());
  }

  // How often a group has become ready.
  uint64_t formations() const TRIBUTARY_LOCKED { return formations_; }

 private:
  void BeginRound() TRIBUTARY_LOCKED;
  void SendCache(Cache& cache) TRIBUTARY_LOCKED;
  // Sends a command whose answer the round waits for.
  void SendCounted(worker::CacheId cache, GroupCommands::Body body) TRIBUTARY_LOCKED;
  void OnAnswer(uint64_t epoch, const absl::Status& status) TRIBUTARY_UNLOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  Observer& observer_;
  CoordinatorLock& lock_;
  ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;
  CacheRegistry& caches_;
  RegisteredRegions& regions_;
  Sessions& sessions_;

  // Commands of the round that have not been answered.
  int unanswered_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // When a refused round is begun again.
  std::optional<CoordinatorLock::Clock::time_point> retry_at_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  uint64_t formations_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
};

}  // namespace tributary::service
