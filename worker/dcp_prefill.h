// Prefill over a cache sharded by token.
//
// Two parts with disjoint keys, merged at the end:
//   context     what was in the cache before the call: sharded by token, so each rank attends with
//               all query heads over its share, and the exchange scatters the merged partial over
//               ranks by heads
//   new tokens  over each other, from the K/V of the call in full precision: each rank computes its
//               own slice of the heads, so the work that grows with the square of the chunk is
//               split and nothing of it crosses ranks
// Sinks enter when the two are merged, not in the exchange. Rows that bring no tokens see the cache
// up to their own position and have no second part. The same cut as vLLM's BatchDCPPrefillWrapper
// makes, with one difference: the mask of the context part is a range, never a bitmap.
#pragma once

#include "absl/status/status.h"
#include "worker/plan.h"
#include "worker/step_run.h"

namespace tributary::worker {

class DcpPrefillWrapper {
 public:
  explicit DcpPrefillWrapper(const RankResources& rank) : rank_(rank) {}

  // Of a plan for StepKind::kPrefill. Entered by all ranks with plans of the same entries.
  absl::Status Run(const StepPlan& plan, const StepOperands& operands, StepResults* results);

 private:
  // The slice of this rank's heads of the whole call, being turned from the new tokens' partial
  // into the result.
  struct Slice {
    collective::HeadSlice heads;
    float* o = nullptr;    // [query rows, heads.count, head_dim]
    float* lse = nullptr;  // [query rows, heads.count]
  };

  absl::Status AttendNewTokens(const StepPlan& plan, const StepOperands& operands,
                               const Slice& slice);
  // Adds the context of the pass's rows to the slice, and the sinks.
  absl::Status AddContext(const StepPlan& plan, const RowPass& pass, const StepOperands& operands,
                          const Slice& slice, StepResults* results);
  absl::Status MergeIntoSlice(const RowPass& pass, const StepOperands& operands, const Slice& slice,
                              const float* context_o, const float* context_lse);
  absl::Status Gather(const RowPass& pass, const StepOperands& operands, const Slice& slice,
                      StepResults* results);

  RankResources rank_;
};

}  // namespace tributary::worker
