// The coordinator's way of giving commands to its group of workers.
//
// Commands are decided under the lock, in an order that all ranks then see. They are built and
// handed over when the critical section has ended (Submit).
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "service/coordinator/cache.h"
#include "service/coordinator/critical_section.h"
#include "service/coordinator/serving_state.h"
#include "service/workers/command_queue.h"
#include "service/workers/worker_group.h"
#include "worker/command.h"

namespace tributary::service {

class GroupCommands {
 public:
  using Body = decltype(worker::Command::body);
  // Fills a command whose number, cache, epoch and deadline are set. Called without the lock.
  using Fill = std::function<void(worker::Command*)>;

  // `timeout`: how long a command may take. All of them outlive this.
  GroupCommands(WorkerGroup* group, CoordinatorLock& lock, const ServingState& serving,
                std::chrono::milliseconds timeout)
      : lock_(lock), serving_(serving), timeout_(timeout), queue_(group) {}

  // One command, of the present epoch. `done` is called without the lock, once. It may take
  // `more_time` beyond the timeout, and so may those behind it.
  void Send(worker::CacheId cache, Fill fill, WorkerGroup::Done done,
            std::chrono::milliseconds more_time = {}) TRIBUTARY_LOCKED;
  // The same, for a command that is known already.
  void SendBody(worker::CacheId cache, Body body, WorkerGroup::Done done) TRIBUTARY_LOCKED;
  // Tells the workers how sequences stand, which a command that they refused would have told them.
  // A group that breaks is told all standings anew in any case.
  void TellAgain(worker::CacheId cache, std::vector<worker::Standing> standings) TRIBUTARY_LOCKED;
  // One command per group of layers of a cache; body(group) is called before this returns. `done`
  // gets the first failure when all of them have been answered.
  void SendToLayerGroups(const Cache& cache, const std::function<Body(int32_t group)>& body,
                         std::function<void(const absl::Status&)> done) TRIBUTARY_LOCKED;

  // Has the workers create a cache, or one group of its layers. They take its memory a little at a
  // time, one cache at a time and each in its turn, so that steps of others come in between: a
  // worker that is asked takes no step for a moment. `done` is called without the lock, once.
  void CreateCache(worker::CacheId cache, worker::CreateCacheCommand command,
                   std::function<void(const absl::Status&)> done) TRIBUTARY_LOCKED;
  // When the workers are next to be asked for more memory; max() for never.
  CoordinatorLock::Clock::time_point NextDue() const TRIBUTARY_LOCKED;
  void ActIfDue() TRIBUTARY_LOCKED { CreateMore(); }

  // Without the lock: hands the commands sent so far to the workers, or leaves that to the thread
  // that is already doing it.
  void Submit() { queue_.Drain(); }
  // WorkerGroup's; without the lock.
  bool borrows() const { return queue_.borrows(); }
  void Lend(const std::function<bool()>& over) { queue_.Lend(over); }
  void LendOnce() { queue_.LendOnce(); }

 private:
  struct Creation {
    worker::CacheId cache = 0;
    worker::CreateCacheCommand command;
    std::function<void(const absl::Status&)> done;
  };
  using CreationPtr = std::shared_ptr<Creation>;

  void CreateMore() TRIBUTARY_LOCKED;
  void OnCreateAnswer(const CreationPtr& creation, const Outcome& outcome) TRIBUTARY_UNLOCKED;

  CoordinatorLock& lock_;
  const ServingState& serving_;
  const std::chrono::milliseconds timeout_;
  // What commands that have not been answered may take beyond the timeout, together.
  std::atomic<std::chrono::milliseconds::rep> more_time_ = 0;
  CommandQueue queue_;

  // Those that wait for their turn, and whether one has it.
  std::deque<CreationPtr> creations_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  bool creating_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  CoordinatorLock::Clock::time_point next_creation_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) =
      CoordinatorLock::Clock::time_point::min();
};

}  // namespace tributary::service
