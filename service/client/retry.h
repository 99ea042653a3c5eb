// When a call is repeated, and after how long. Pure functions: the clock and the dice are the
// caller's.
#pragma once

#include <chrono>
#include <optional>

#include "absl/status/status.h"

namespace tributary::client {

// Whether the outcome says that the same call may succeed a little later: UNAVAILABLE and ABORTED.
// Everything else either is final or, as DEADLINE_EXCEEDED, leaves no time.
bool IsTransient(const absl::Status& status);

// Whether the call may have taken effect, or may still: nobody who would know has answered.
bool IsOutcomeUnknown(const absl::Status& status);

// NOT_FOUND of a shared memory region: the service has forgotten it, as after a restart. Repeated
// with the tensors placed elsewhere.
bool IsForgottenRegion(const absl::Status& status);
// How often a call is tried that ends so each time: a region that is not shared any more does not
// come back.
inline constexpr int kRegionAttempts = 4;

// Whether there is another attempt after `failed_attempts` of them; `max_attempts` 0: always.
bool MayAttempt(int failed_attempts, int max_attempts);

// The delay before the attempt after `failed_attempts` (>= 1) failed ones. `uniform` in [0, 1).
//
// With a delay the service asked for: that delay and up to a fifth more, so that hosts that were
// refused together do not return together. Otherwise exponential with full jitter over the upper
// half: 50..100 ms, 100..200 ms, ... at most 1..2 s.
std::chrono::milliseconds RetryDelay(int failed_attempts,
                                     std::optional<std::chrono::milliseconds> asked,
                                     double uniform);

}  // namespace tributary::client
