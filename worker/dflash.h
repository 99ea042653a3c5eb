// DFlash: a block-diffusion draft's attention over a cache sharded by token.
//
// A call brings, for each of its sequences, a block of rows (the anchor and the masks behind it)
// at positions L, L + 1, ... with the K/V of the block. The rows see the context, the L tokens of
// the cache before them, and the block, under the layer's mask (kernels/row_mask.h): the whole
// block both ways unless it says otherwise. The block's K/V are not kept. The context is what
// Append stored: the target's hidden states, projected by the draft.
//
// Two parts with disjoint keys:
//   context  sharded by token: each rank attends with all query heads over its share
//   block    in full precision, split over ranks by query heads: the rank of a head computes it
//            for all rows
// The block's partial of a head is merged into the partial that its rank has of the context, before
// the exchange. Merging is associative, so one exchange then gives the whole, sinks applied once in
// it; and which rank brings the block in depends on the head alone, so that a row's result does not
// depend on its company in the batch.
#pragma once

#include "absl/status/status.h"
#include "worker/step_operations.h"

namespace tributary::worker {

class DflashWrapper {
 public:
  explicit DflashWrapper(StepOperations& operations) : operations_(operations) {}

  // Of a plan for StepKind::kDflash. Entered by all ranks with plans of the same entries.
  absl::Status Run(const PlannedStep& step);

 private:
  StepOperations& operations_;
};

}  // namespace tributary::worker
