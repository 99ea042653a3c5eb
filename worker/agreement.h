// Ranks agree before they wait for each other.
#pragma once

#include "absl/status/status.h"
#include "collective/communicator.h"

namespace tributary::worker {

// Whether every rank has taken the memory that a step needs. All ranks call it at the same place of
// the step, before any of them waits for another's part of it. OK: all of them have. One that was
// refused memory (`own`) makes it RESOURCE_EXHAUSTED on all ranks alike, `*refused` is set, and the
// communicator is as good as before: the ranks leave the step together. Other errors are the
// communicator's.
absl::Status AgreeOnMemory(collective::Communicator& comm, const absl::Status& own,
                           collective::Deadline deadline, bool* refused);

}  // namespace tributary::worker
