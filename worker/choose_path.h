// Which of the two ways to attend over a sharded cache a step takes.
#pragma once

#include <cstdint>

#include "worker/command.h"

namespace tributary::worker {

// New tokens of one sequence up to which a step is a decode (or verify).
inline constexpr int32_t kMaxDecodeRows = 64;

// Pure, of numbers all ranks know. `query_rows` and `new_tokens` are the largest over the entries.
constexpr StepKind ChoosePath(int32_t query_rows, int32_t new_tokens) {
  if (query_rows == 0) return StepKind::kAppend;
  // Few new tokens: reading them back from the cache costs next to nothing, and one attention call
  // with one exchange serves all rows. Rows that bring no tokens lie wholly in the cache however
  // many they are, so they need no second part either.
  if (new_tokens <= kMaxDecodeRows) return StepKind::kDecode;
  // Many: their attention over each other is most of the work. It is split over ranks by heads, and
  // in full precision.
  return StepKind::kPrefill;
}

}  // namespace tributary::worker
