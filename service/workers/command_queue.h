// Hands commands to the workers in the order they were decided, outside the decider's lock.
//
// The order of commands is the order of the coordinator's decisions, which are made under its lock;
// building a command (copying tensors) and submitting it (which may complete it at once) must not
// happen there. So decisions are queued under the lock and carried out by whoever drains the queue:
// one thread at a time, without waiting for each other.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "service/workers/worker_group.h"
#include "worker/command.h"

namespace tributary::service {

class CommandStream {
 public:
  // Makes the command of a number.
  using Build = std::function<worker::Command(uint64_t number)>;

  explicit CommandStream(WorkerGroup* group) : group_(group) {}

  // Cheap; does not call out. Drain() must follow.
  void Enqueue(Build build, WorkerGroup::Done done);
  // Submits what is queued, or leaves it to the thread that is already at it.
  void Drain();

 private:
  struct Job {
    Build build;
    WorkerGroup::Done done;
  };

  WorkerGroup* const group_;
  std::mutex mutex_;
  std::deque<Job> jobs_;
  bool draining_ = false;
  uint64_t next_number_ = 1;
};

}  // namespace tributary::service
