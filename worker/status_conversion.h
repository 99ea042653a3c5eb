// From the status of the lower floors to absl::Status.
#pragma once

#include "absl/status/status.h"
#include "kernels/status.h"

namespace tributary::worker {

// One to one by code.
absl::Status ToAbsl(const tributary::Status& status);

// Of a collective operation: whatever went wrong, the group is broken and the step is safe to
// repeat. kDeadlineExceeded stays; everything else is kAborted.
absl::Status CollectiveStatus(const tributary::Status& status);

}  // namespace tributary::worker
