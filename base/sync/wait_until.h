// Waiting on a condition variable until a time of the steady clock, which absl::CondVar does not
// know.
#pragma once

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace tributary {

// Returns, with the mutex held again, once notified or when `deadline` has passed; it may also
// return for no reason. True when the deadline has passed. Callers wait in a loop over their
// condition, which the thread-safety analysis can follow.
inline bool WaitUntil(absl::CondVar& changed, absl::Mutex& mutex,
                      std::chrono::steady_clock::time_point deadline)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  const auto left = deadline - std::chrono::steady_clock::now();
  if (left <= left.zero()) return true;
  return changed.WaitWithTimeout(&mutex, absl::FromChrono(left));
}

}  // namespace tributary
