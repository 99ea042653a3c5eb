// Attention of a pass of query rows over this rank's share of the cache.
#pragma once

#include "absl/status/status.h"
#include "worker/plan.h"
#include "worker/step_run.h"

namespace tributary::worker {

// The partial of all query heads. o: [rows of the pass, q_heads, value_dim]; lse: the same without
// value_dim.
absl::Status AttendContext(const StepPlan& plan, const RowPass& pass, const StepOperands& operands,
                           const RankResources& rank, float* o, float* lse);

}  // namespace tributary::worker
