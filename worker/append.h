// The K/V of a step's new tokens: written to the shard, or compared with it.
#pragma once

#include "absl/status/status.h"
#include "worker/plan.h"
#include "worker/step_run.h"

namespace tributary::worker {

// Writes the tokens this rank owns; of replayed entries compares instead, and puts entries with a
// difference into results->conflicts. A conflict is a result, not an error.
absl::Status AppendOrCompare(const StepPlan& plan, const StepOperands& operands,
                             const RankResources& rank, StepResults* results);

}  // namespace tributary::worker
