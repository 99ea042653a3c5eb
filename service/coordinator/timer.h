// The coordinator's thread for what is due at a time: deadlines, batch windows, retries.
#pragma once

#include <functional>
#include <thread>
#include <utility>

#include "base/sync/mutex.h"
#include "service/coordinator/critical_section.h"

namespace tributary::service {

class Timer {
 public:
  using Clock = CoordinatorLock::Clock;

  // Both are called with the lock held. `next_due` says when something is due (max() for never),
  // `act` does what is due.
  Timer(CoordinatorLock& lock, std::function<Clock::time_point()> next_due,
        std::function<void(Clock::time_point now)> act)
      : lock_(lock), next_due_(std::move(next_due)), act_(std::move(act)) {}

  void Start();
  // Wakes the thread if something is due before it would wake.
  void Reconsider() TRIBUTARY_LOCKED;
  // The thread ends when it next looks. Join waits for that.
  void Stop() TRIBUTARY_LOCKED;
  void Join();

 private:
  void Loop();
  // Sleeps until something is due. False when the thread is to end.
  bool Sleep() TRIBUTARY_UNLOCKED;

  CoordinatorLock& lock_;
  const std::function<Clock::time_point()> next_due_;
  const std::function<void(Clock::time_point now)> act_;
  CondVar wake_;
  bool stopped_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = false;
  // min() while the thread is awake.
  Clock::time_point sleeps_until_ TRIBUTARY_GUARDED_BY(kCoordinatorLock) = Clock::time_point::min();
  std::thread thread_;
};

}  // namespace tributary::service
