// Which way rows attend over a sharded cache, and which of them a step needs.
#pragma once

#include <cstdint>

#include "worker/command.h"

namespace tributary::worker {

// New tokens of an entry up to which it is a decode (or verify); and rows of one up to which
// kernels for few rows serve it.
inline constexpr int32_t kMaxDecodeRows = 64;

// Whether rows of an entry see the tokens that it brings as they came. Rows of other entries see
// them as the cache keeps them, also those beside such an entry in a call or a step: nothing but
// the entry itself decides.
constexpr bool SeesTokensAsTheyCame(int32_t query_rows, int32_t new_tokens,
                                    int32_t max_decode_rows = kMaxDecodeRows) {
  return query_rows > 0 && new_tokens > max_decode_rows;
}

// What a step needs. Pure, of numbers all ranks know. `query_rows` and `new_tokens` are the largest
// over the entries.
constexpr StepKind ChoosePath(int32_t query_rows, int32_t new_tokens) {
  if (query_rows == 0) return StepKind::kAppend;
  // Few new tokens: reading them back from the cache costs next to nothing, and one attention call
  // with one exchange serves all rows. Rows that bring no tokens lie wholly in the cache however
  // many they are, so they need no second part either.
  if (!SeesTokensAsTheyCame(query_rows, new_tokens)) return StepKind::kDecode;
  // Many: their attention over each other is most of the work. It is split over ranks by heads, and
  // in full precision.
  return StepKind::kPrefill;
}

}  // namespace tributary::worker
