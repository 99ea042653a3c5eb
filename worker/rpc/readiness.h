// Whether this worker is part of a group that can execute: the answer of its health service.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tributary::worker {

class Readiness {
 public:
  // `changed` is told of every change, one call at a time, from any thread; may be empty.
  explicit Readiness(std::function<void(bool ready)> changed) : changed_(std::move(changed)) {}

  // Not ready until Reached(epoch).
  void Expect(uint64_t epoch) {
    const absl::MutexLock lock(&mutex_);
    expected_ = epoch;
    Set(false);
  }
  // Not ready until a new epoch is expected and reached.
  void Leave() { Expect(0); }
  // Not ready any more, whatever comes.
  void Close() {
    const absl::MutexLock lock(&mutex_);
    closed_ = true;
    Set(false);
  }
  // Ready, unless another epoch is expected by now.
  void Reached(uint64_t epoch) {
    const absl::MutexLock lock(&mutex_);
    if (epoch == expected_ && !closed_) Set(true);
  }

 private:
  void Set(bool ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ready == ready_) return;
    ready_ = ready;
    if (changed_) changed_(ready);
  }

  const std::function<void(bool)> changed_;
  absl::Mutex mutex_;
  uint64_t expected_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tributary::worker
