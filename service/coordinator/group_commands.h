// The coordinator's way of giving commands to its group of workers.
//
// Commands are decided under the lock, in an order that all ranks then see. They are built and
// handed over when the critical section has ended (Submit).
#pragma once

#include <chrono>
#include <functional>

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

  // `timeout`: how long a command may take. `group` and `serving` outlive this.
  GroupCommands(WorkerGroup* group, const ServingState& serving, std::chrono::milliseconds timeout)
      : serving_(serving), timeout_(timeout), queue_(group) {}

  // One command, of the present epoch. `done` is called without the lock, once.
  void Send(worker::CacheId cache, Fill fill, WorkerGroup::Done done) TRIBUTARY_LOCKED;
  // The same, for a command that is known already.
  void SendBody(worker::CacheId cache, Body body, WorkerGroup::Done done) TRIBUTARY_LOCKED;
  // One command per group of layers of a cache; body(group) is called before this returns. `done`
  // gets the first failure when all of them have been answered.
  void SendToLayerGroups(const Cache& cache, const std::function<Body(int32_t group)>& body,
                         std::function<void(const absl::Status&)> done) TRIBUTARY_LOCKED;

  // Without the lock: hands the commands sent so far to the workers, or leaves that to the thread
  // that is already doing it.
  void Submit() { queue_.Drain(); }

 private:
  const ServingState& serving_;
  const std::chrono::milliseconds timeout_;
  CommandQueue queue_;
};

}  // namespace tributary::service
