// Prefill over a cache sharded by token.
//
// Two parts with disjoint keys, merged at the end:
//   context     what was in the cache before the call: sharded by token, so each rank attends with
//               all query heads over its share, and the exchange scatters the merged partial over
//               ranks by heads
//   new tokens  over each other, from the K/V of the call in full precision: each rank computes its
//               own slice of the heads, so the work that grows with the square of the chunk is
//               split and nothing of it crosses ranks
// Sinks enter when the two are merged, not in the exchange. Rows of entries that bring few tokens
// or none (SeesTokensAsTheyCame) see the cache up to their own position, have no second part, and
// are computed as in a decode, to the bit. The same cut as vLLM's BatchDCPPrefillWrapper makes,
// with one difference: the mask of the context part is a range, never a bitmap.
#pragma once

#include "absl/status/status.h"
#include "worker/step_operations.h"

namespace tributary::worker {

class DcpPrefillWrapper {
 public:
  explicit DcpPrefillWrapper(StepOperations& operations) : operations_(operations) {}

  // Of a plan for StepKind::kPrefill. Entered by all ranks with plans of the same entries.
  absl::Status Run(const PlannedStep& step);

 private:
  StepOperations& operations_;
};

}  // namespace tributary::worker
