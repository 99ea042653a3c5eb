#include "service/client/retry.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/match.h"
#include "base/status/errors.h"
#include "base/status/rpc_errors.h"

namespace tributary::client {
namespace {

constexpr std::chrono::milliseconds kFirst{100};
constexpr std::chrono::milliseconds kMost{2'000};

}  // namespace

bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status);
}

bool IsOutcomeUnknown(const absl::Status& status) {
  switch (status.code()) {
    // Our service says when to come back; the library, when a connection breaks, does not.
    case absl::StatusCode::kUnavailable:
      return !RetryDelayOf(status).has_value();
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
      return true;
    default:
      return false;
  }
}

bool IsForgottenRegion(const absl::Status& status) {
  return absl::IsNotFound(status) && absl::EndsWith(FieldOf(status), ".shared_memory.region");
}

bool MayAttempt(int failed_attempts, int max_attempts) {
  return max_attempts == 0 || failed_attempts < max_attempts;
}

std::chrono::milliseconds RetryDelay(int failed_attempts,
                                     std::optional<std::chrono::milliseconds> asked,
                                     double uniform) {
  const auto scaled = [](std::chrono::milliseconds delay, double factor) {
    return std::chrono::milliseconds(
        static_cast<int64_t>(static_cast<double>(delay.count()) * factor));
  };
  if (asked.has_value()) return scaled(*asked, 1.0 + 0.2 * uniform);
  // Beyond ten doublings the cap holds anyway; the bound keeps the shift defined.
  const int doublings = std::clamp(failed_attempts - 1, 0, 10);
  return scaled(std::min(kMost, kFirst * (1 << doublings)), 0.5 + 0.5 * uniform);
}

}  // namespace tributary::client
