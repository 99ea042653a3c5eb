// The checks every backend makes before it writes anything. A refusal names the field, as in
// "kv.page_size: 24 is not 16, 32, 64 or 128".
#pragma once

#include "kernels/params.h"
#include "kernels/status.h"

namespace tributary {

// Broken contract: kInvalidArgument. Well formed but supported by no backend (head dims that
// kernels/head_dims.h does not serve, more than kMaxGqaRatio query heads per KV head):
// kFailedPrecondition.
Status Validate(const AppendParams& p);
Status Validate(const AttentionParams& p);
Status Validate(const NewTokensParams& p);
Status Validate(const MergeParams& p);

}  // namespace tributary
