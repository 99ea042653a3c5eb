// Commands on their way to the workers, in the order in which they were decided.
//
// Commands are decided under the coordinator's lock. Building a command (which copies tensors) and
// submitting it (which may complete it at once) must not happen there. So decisions are queued
// under that lock, and whoever drains the queue carries them out: one thread at a time, and no
// thread waits for another.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>

#include "base/sync/mutex.h"
#include "service/workers/worker_group.h"
#include "worker/command.h"

namespace tributary::service {

// Thread safe.
class CommandQueue {
 public:
  // Makes the command with this number. Called once.
  using Build = std::function<worker::Command(uint64_t number)>;

  // `group` outlives the queue.
  explicit CommandQueue(WorkerGroup* group) : group_(group) {}

  // Cheap; calls nobody. The caller drains the queue afterwards, without its own lock.
  void Enqueue(Build build, WorkerGroup::Done done);
  // Submits what is queued, or leaves that to the thread that is already doing it.
  void Drain();
  // Of the group.
  bool borrows() const { return group_->borrows(); }
  void Lend(const std::function<bool()>& over) { group_->Lend(over); }
  void LendOnce() { group_->LendOnce(); }

 private:
  struct Job {
    Build build;
    WorkerGroup::Done done;
  };

  WorkerGroup* const group_;
  Mutex mutex_;
  std::deque<Job> jobs_ TRIBUTARY_GUARDED_BY(mutex_);
  bool draining_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  uint64_t next_number_ TRIBUTARY_GUARDED_BY(mutex_) = 1;
};

}  // namespace tributary::service
