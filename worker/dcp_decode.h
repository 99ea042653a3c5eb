// Decode and multi-token verify over a cache sharded by token.
//
// The new K/V are written first. Then every row is a row over the cache: it sees the keys up to its
// own position (and within the window), whoever's token they are, as one range of local slots. Each
// rank attends with all query heads over its share; one exchange merges the partials and applies
// sinks.
#pragma once

#include "absl/status/status.h"
#include "worker/step_operations.h"

namespace tributary::worker {

class DcpDecodeWrapper {
 public:
  explicit DcpDecodeWrapper(StepOperations& operations) : operations_(operations) {}

  // Of a plan for StepKind::kDecode. Entered by all ranks with plans of the same entries.
  absl::Status Run(const PlannedStep& step);

 private:
  StepOperations& operations_;
};

}  // namespace tributary::worker
