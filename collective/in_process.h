// Ranks as threads of one process.
//
// An operation succeeds on every rank or on none. The first error, of whichever rank, is every
// rank's error. Ranks that enter different operations get kInternal. A communicator that is
// destroyed breaks those of its peers (kUnavailable) once the operation under way is over.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective/communicator.h"

namespace tributary::collective {

// One communicator a rank, sharing one group; none when `size` is below 1.
std::vector<std::unique_ptr<Communicator>> CreateInProcessGroup(int size, uint64_t epoch);

}  // namespace tributary::collective
