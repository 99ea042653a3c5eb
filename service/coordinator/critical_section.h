// The lock that guards all state of a coordinator, and the two ways to hold it.
//
// Under the lock decisions are made, and a decision costs no more than the request that it is
// about. Copying tensors, talking to workers and answering callers happen after the lock is
// released: see Defer, Answer and EndOfSection.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/sync/mutex.h"
#include "service/coordinator/deferred_calls.h"
#include "service/data/coordinator_lock.h"

namespace tributary::service {

// What a coordinator does whenever a critical section ends.
class EndOfSection {
 public:
  virtual ~EndOfSection() = default;
  // With the lock held: begins what can begin now.
  virtual void BeforeRelease() TRIBUTARY_LOCKED = 0;
  // Without the lock: hands commands to the workers. It follows the deferred calls, so that callers
  // have their answers before the next step is built, unless these answer many.
  virtual void AfterRelease() = 0;
};

// One per coordinator. Hold it through CriticalSection or ReadSection.
class CoordinatorLock {
 public:
  using Clock = std::chrono::steady_clock;

  // `end` outlives the lock.
  explicit CoordinatorLock(EndOfSection* end) : end_(*end) {}

  // `call` is made when this critical section has ended, on the same thread, in order.
  void Defer(std::function<void()> call) TRIBUTARY_LOCKED { deferred_.Add(std::move(call)); }

  // A call of the API is accepted. Each one is answered by one Answer.
  void AcceptCall() TRIBUTARY_LOCKED { ++open_calls_; }
  // Defers a call that answers `count` accepted calls of the API.
  void Answer(std::function<void()> call, int64_t count = 1) TRIBUTARY_LOCKED {
    deferred_.AddAnswer(std::move(call), count);
  }
  // Accepted and not yet answered.
  int64_t open_calls() const TRIBUTARY_LOCKED { return open_calls_; }
  // Waits until no accepted call is open; false when `until` came first.
  bool WaitIdle(Clock::time_point until);

  // Releases the lock until `changed` is notified or `until` has come; max() waits without limit.
  void Wait(CondVar& changed, Clock::time_point until) TRIBUTARY_LOCKED;

 private:
  friend class CriticalSection;
  friend class ReadSection;

  void CountAnswered(int64_t count);

  EndOfSection& end_;
  // The mutex that kCoordinatorLock stands for.
  Mutex mutex_;
  CondVar idle_;
  DeferredCalls deferred_ TRIBUTARY_GUARDED_BY(kCoordinatorLock);
  int64_t open_calls_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = 0;
};

// Holds the lock in order to decide something. When it ends, EndOfSection::BeforeRelease is called,
// the lock is released, the deferred calls are made, and EndOfSection::AfterRelease is called, the
// last two in the other order where many callers are answered.
class TRIBUTARY_THREAD_ANNOTATION(scoped_lockable) CriticalSection {
 public:
  explicit CriticalSection(CoordinatorLock& lock)
      TRIBUTARY_THREAD_ANNOTATION(exclusive_lock_function(kCoordinatorLock));
  ~CriticalSection() TRIBUTARY_THREAD_ANNOTATION(unlock_function());
  CriticalSection(const CriticalSection&) = delete;
  CriticalSection& operator=(const CriticalSection&) = delete;

 private:
  CoordinatorLock& lock_;
};

// Holds the lock in order to look at state; nothing is begun and nothing deferred when it ends.
class TRIBUTARY_THREAD_ANNOTATION(scoped_lockable) ReadSection {
 public:
  explicit ReadSection(CoordinatorLock& lock)
      TRIBUTARY_THREAD_ANNOTATION(exclusive_lock_function(kCoordinatorLock));
  ~ReadSection() TRIBUTARY_THREAD_ANNOTATION(unlock_function());
  ReadSection(const ReadSection&) = delete;
  ReadSection& operator=(const ReadSection&) = delete;

 private:
  CoordinatorLock& lock_;
};

}  // namespace tributary::service
