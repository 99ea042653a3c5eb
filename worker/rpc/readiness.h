// Whether this worker is part of a group that can execute: the answer of its health service.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "base/sync/mutex.h"

namespace tributary::worker {

class Readiness {
 public:
  // `changed` is told of every change, one call at a time, from any thread; may be empty.
  explicit Readiness(std::function<void(bool ready)> changed) : changed_(std::move(changed)) {}

  // The worker is not ready until Reached(epoch).
  void Expect(uint64_t epoch) {
    const MutexLock lock(mutex_);
    expected_ = epoch;
    Set(false);
  }
  // The worker is not ready until a new epoch is expected and reached.
  void Leave() { Expect(0); }
  // The worker is never ready again, whatever comes.
  void Close() {
    const MutexLock lock(mutex_);
    closed_ = true;
    Set(false);
  }
  // The worker is ready, unless another epoch is expected by now.
  void Reached(uint64_t epoch) {
    const MutexLock lock(mutex_);
    if (epoch == expected_ && !closed_) Set(true);
  }

 private:
  void Set(bool ready) TRIBUTARY_REQUIRES(mutex_) {
    if (ready == ready_) return;
    ready_ = ready;
    if (changed_) changed_(ready);
  }

  const std::function<void(bool)> changed_;
  Mutex mutex_;
  uint64_t expected_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // 0: none
  bool ready_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool closed_ TRIBUTARY_GUARDED_BY(mutex_) = false;
};

}  // namespace tributary::worker
