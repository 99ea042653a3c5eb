// Agreements that ranks reach before they wait for each other.
#pragma once

#include "absl/status/status.h"
#include "collective/communicator.h"

namespace tributary::worker {

// Tells all ranks alike whether every one of them has taken the memory that a step needs. All ranks
// call this at the same place of the step, before any of them waits for another's part of it. `own`
// says whether this rank has. Where some rank was refused memory the result is RESOURCE_EXHAUSTED
// on all of them, `*refused` is set, the communicator is as good as before, and the ranks leave the
// step together. Other errors are the communicator's.
absl::Status AgreeOnMemory(collective::Communicator& comm, const absl::Status& own,
                           collective::Deadline deadline, bool* refused);

}  // namespace tributary::worker
