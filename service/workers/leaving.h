// How a group's break is told from trouble where a worker that was told to stop has left it.
#pragma once

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace tributary::service {

// What the reason that GroupObserver::OnBroken is told ends with, in that case.
inline constexpr absl::string_view kIsLeaving = "it is leaving";

inline bool LeftInOrder(absl::string_view reason) { return absl::EndsWith(reason, kIsLeaving); }

}  // namespace tributary::service
