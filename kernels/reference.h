// The oracle: attention, append and merge in float64, written to be read, not to be fast.
// Same parameters as the backends; results in double.
#pragma once

#include <vector>

#include "kernels/params.h"

namespace tributary {

struct ReferenceResult {
  std::vector<double> o;    // [rows, heads, head_dim]
  std::vector<double> lse;  // [rows, heads]
};

// Over the dequantised cache.
ReferenceResult ReferenceAttention(const AttentionParams& p);
ReferenceResult ReferenceNewTokens(const NewTokensParams& p);
ReferenceResult ReferenceMerge(const MergeParams& p);
// Writes the cache itself (rounding to nearest even, saturating to the largest finite value).
void ReferenceAppend(const AppendParams& p);

}  // namespace tributary
