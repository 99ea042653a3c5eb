// Ranks as threads of one process.
//
// An operation succeeds on every rank or on none. The first error on any rank becomes the error of
// every rank. Ranks that enter different operations get kInternal. When a communicator is
// destroyed, those of its peers break (kUnavailable) as soon as the operation under way is over.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective/communicator.h"

namespace tributary::collective {

// One communicator for each rank, in rank order; all share one group. Empty when `size` is below 1.
std::vector<std::unique_ptr<Communicator>> CreateInProcessGroup(int size, uint64_t epoch);

}  // namespace tributary::collective
