// A thread that calls the callbacks of completed commands.
#pragma once

#include <deque>
#include <thread>

#include "base/sync/mutex.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

// It calls them in the order in which they were added. They may block or call back into the group,
// which they could do neither on gRPC's threads nor under the group's mutex. Thread safe.
class Completions {
 public:
  Completions() : thread_([this] { Loop(); }) {}
  ~Completions() { Stop(); }

  // After Stop, `done` is called at once: there is no thread any more, and no group whose mutex
  // could be held.
  void Add(WorkerGroup::Done done, Outcome outcome);

  // Calls `done` at once, on this thread, when no other waits or is being called; otherwise it does
  // what Add does. A thread that has nothing else to do so saves handing the call to another one.
  void CallOrAdd(WorkerGroup::Done done, Outcome outcome);

  // Returns when everything that was added has been called.
  void Stop();

 private:
  struct Item {
    WorkerGroup::Done done;
    Outcome outcome;
  };

  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> work_ TRIBUTARY_GUARDED_BY(mutex_);
  bool calling_ TRIBUTARY_GUARDED_BY(mutex_) = false;  // whether some thread calls a `done`
  bool stopping_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tributary::service
