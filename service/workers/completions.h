// A thread that runs what callers of a group gave it to run.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "service/workers/worker_group.h"

namespace tributary::service {

// In order. What runs here may block or call back into the group, which it could do neither on
// gRPC's threads nor below the group's mutex.
class Completions {
 public:
  Completions() : thread_([this] { Loop(); }) {}
  ~Completions() { Stop(); }

  // After Stop it runs at once: there is no thread any more, and no group whose mutex could be
  // held.
  void Add(WorkerGroup::Done done, Outcome outcome);

  // After everything that was added.
  void Stop();

 private:
  struct Item {
    WorkerGroup::Done done;
    Outcome outcome;
  };

  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> work_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tributary::service
