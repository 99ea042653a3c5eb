// The oracle: attention, append and merge in float64, written to be read, not to be fast.
// Same parameters as the backends; results in double.
#pragma once

#include <vector>

#include "kernels/params.h"

namespace tributary {

struct ReferenceResult {
  std::vector<double> o;    // [rows, heads, value_dim]
  std::vector<double> lse;  // [rows, heads]
};

// Over the dequantised cache.
ReferenceResult ReferenceAttention(const AttentionParams& p);
ReferenceResult ReferenceNewTokens(const NewTokensParams& p);
ReferenceResult ReferenceMerge(const MergeParams& p);
// Writes the cache itself: element / scale in float, rounded to nearest even. FP8 saturates to the
// largest finite value; bf16 and f16 overflow to infinity, as IEEE 754 does.
void ReferenceAppend(const AppendParams& p);

}  // namespace tributary
