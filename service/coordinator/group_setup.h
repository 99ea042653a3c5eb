// What the coordinator does when its group of workers breaks and forms again.
//
// A group that has formed is brought, in one round of commands, to what the coordinator knows:
// caches, tables, what was dropped meanwhile. When all of them are answered the service is ready. A
// cache that the workers refuse is set aside (Cache::not_held), so that the others are served, and
// tried again after pauses that grow.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
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
#include "service/coordinator/resizing.h"
#include "service/coordinator/restoration.h"
#include "service/coordinator/serving_state.h"
#include "service/coordinator/sessions.h"
#include "service/observe/observer.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

class GroupSetup final : public GroupObserver {
 public:
  // All of them outlive this.
  GroupSetup(const CoordinatorOptions& options, const telemetry::Logger& log, Observer& observer,
             const WorkerGroup& group, CoordinatorLock& lock, ServingState& serving,
             GroupCommands& commands, CallOrder& order, CacheRegistry& caches,
             RegisteredRegions& regions, Sessions& sessions, Restoration& restoration,
             Resizing& resizing);

  // The group calls these from its own thread, one at a time.
  void OnAdopted(const std::vector<std::optional<worker::Holdings>>& held) override
      TRIBUTARY_UNLOCKED;
  void OnFormed(uint64_t epoch, const std::vector<bool>& fresh) override TRIBUTARY_UNLOCKED;
  void OnBroken(const std::string& reason) override TRIBUTARY_UNLOCKED;
  bool OnLeaving(int rank) override TRIBUTARY_UNLOCKED;
  void OnSessionNews(const worker::SessionNews& news) override TRIBUTARY_UNLOCKED {
    sessions_.OnNews(news);
  }

  // Brings the workers what they refused, if its time has come.
  void RetryIfDue(CoordinatorLock::Clock::time_point now) TRIBUTARY_LOCKED;
  // When that is, or max().
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED {
    return retry_at_.value_or(CoordinatorLock::Clock::time_point::max());
  }

  // How often a group has become ready.
  uint64_t formations() const TRIBUTARY_LOCKED { return formations_; }

 private:
  // One cache's set-up.
  struct Attempt {
    uint64_t round = 0;
    CachePtr cache;
    std::vector<worker::SequenceId> undropped;  // Cache::undropped as it was
    int unanswered = 0;                         // commands
    absl::Status failure;                       // the first
  };
  using AttemptPtr = std::shared_ptr<Attempt>;

  void BeginRound() TRIBUTARY_LOCKED;
  void SendCache(const CachePtr& cache) TRIBUTARY_LOCKED;
  // Sends a command whose answer the attempt waits for.
  void SendCounted(const AttemptPtr& attempt, worker::CacheId cache,
                   GroupCommands::Body body) TRIBUTARY_LOCKED;
  // The workers hold a group of layers, or cannot.
  void OnHeld(const AttemptPtr& attempt, int32_t group,
              const absl::Status& status) TRIBUTARY_UNLOCKED;
  void OnAnswer(const AttemptPtr& attempt, const absl::Status& status) TRIBUTARY_UNLOCKED;
  // All its commands are answered.
  void Conclude(const Attempt& attempt) TRIBUTARY_LOCKED;
  // One less is unsettled.
  void OnSettled() TRIBUTARY_LOCKED;

  const CoordinatorOptions& options_;
  const telemetry::Logger& log_;
  Observer& observer_;
  const WorkerGroup& group_;
  CoordinatorLock& lock_;
  ServingState& serving_;
  GroupCommands& commands_;
  CallOrder& order_;
  CacheRegistry& caches_;
  RegisteredRegions& regions_;
  Sessions& sessions_;
  Restoration& restoration_;
  Resizing& resizing_;

  // Answers to an earlier round count for nothing. Rises with every group, and when one breaks.
  uint64_t round_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // Attempts of the round that are not concluded, and one more until all of them are begun.
  int unsettled_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
  // When caches that were refused are tried again, and how long it is to the time after that.
  std::optional<CoordinatorLock::Clock::time_point> retry_at_
      TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  std::chrono::seconds retry_pause_ TRIBUTARY_GUARDED_BY(kCoordinatorLock){1};
  uint64_t formations_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
};

}  // namespace tributary::service
