// The checks every backend makes before it writes anything. A refusal names the field, as in
// "kv.page_size: 24 is not 16, 32, 64 or 128".
#pragma once

#include "kernels/params.h"
#include "kernels/status.h"

namespace tributary {

// Broken contract: kInvalidArgument. Well formed but supported by no backend (head_dim other than
// 64, 128 or 256, more than kMaxGroup query heads to a kv head): kFailedPrecondition.
Status Validate(const AppendParams& p);
Status Validate(const AttentionParams& p);
Status Validate(const NewTokensParams& p);
Status Validate(const MergeParams& p);

// Query heads that share one kv head.
inline constexpr int kMaxGroup = 16;

}  // namespace tributary
