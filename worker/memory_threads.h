// Threads that take memory for new caches while steps of others go on.
//
// A gigabyte takes a second of a processor to be cleared. Threads that run only where a processor
// is idle do that (SCHED_IDLE): a step finds the processors free, and no step waits for a page to
// be cleared. Whoever waited for such a thread would wait until everybody else has nothing to do.
// So it holds no lock, allocates nothing and gives nothing back, and nobody joins it. All else is
// done by the keeper, a thread of normal priority, which also sees to it that a busy machine makes
// some progress.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"

namespace tributary::worker {

// Of one rank. Used by one thread.
class MemoryThreads {
 public:
  // What takes memory, piece by piece.
  class Job {
   public:
    virtual ~Job() = default;
    // Takes the next piece of those that Keep has granted. False: there is none. By any thread;
    // waits for nothing and allocates nothing.
    virtual bool TakeNext() = 0;
    // Counts what has been taken and grants more. False: nothing is left to do. By the thread that
    // adds the job, then by the keeper.
    virtual bool Keep() = 0;
  };

  explicit MemoryThreads(int count);
  // What is under way is waited for.
  ~MemoryThreads();
  MemoryThreads(const MemoryThreads&) = delete;
  MemoryThreads& operator=(const MemoryThreads&) = delete;

  // Works at the job together with those before it, a piece for each in turn. False: the system
  // gives no thread.
  bool Add(std::shared_ptr<Job> job);

  // Lets go of what takes long to be destroyed. The keeper is the last to have it, or the caller
  // where the system gives no thread.
  void Drop(std::shared_ptr<const void> dropped);

 private:
  struct Slot;
  struct Idle;  // what the threads share that may get no turn for a while

  // A slot's owner, which is the keeper's.
  struct Owned {
    std::shared_ptr<Job> job;
    bool over = false;  // and to be dropped as soon as no thread is at work on it
  };

  bool Begin();
  static void TakePieces(const std::shared_ptr<Idle>& idle);
  void Keep();
  void FillSlots() TRIBUTARY_REQUIRES(mutex_);

  const int count_;
  const std::shared_ptr<Idle> idle_;
  Mutex mutex_;
  CondVar added_;
  std::vector<Owned> owned_ TRIBUTARY_GUARDED_BY(mutex_);  // by slot
  std::vector<std::shared_ptr<Job>> waiting_ TRIBUTARY_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const void>> dropped_ TRIBUTARY_GUARDED_BY(mutex_);
  bool ending_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::thread keeper_;  // none before the first job
};

}  // namespace tributary::worker
