// How a peer process tells the test what became of it.
#pragma once

#include "kernels/status.h"

namespace tributary::collective {

inline constexpr int kExitDone = 0;
inline constexpr int kExitUsage = 1;
inline constexpr int kExitWrongData = 2;
// 66 is ThreadSanitizer's.
inline int ExitCodeOf(StatusCode code) { return 10 + static_cast<int>(code); }

}  // namespace tributary::collective
