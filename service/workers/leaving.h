// How a group's break is told from trouble: where a worker that was told to stop has left it, and
// where the number of workers changes.
#pragma once

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace tributary::service {

// What the reason that GroupObserver::OnBroken is told ends with, in the first case, and begins
// with in the second.
inline constexpr absl::string_view kIsLeaving = "it is leaving";
inline constexpr absl::string_view kNumberChanges = "the number of workers changes";

inline bool BrokeInOrder(absl::string_view reason) {
  return absl::EndsWith(reason, kIsLeaving) || absl::StartsWith(reason, kNumberChanges);
}

}  // namespace tributary::service
