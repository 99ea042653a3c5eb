// Ranks as threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective/communicator.h"

namespace tributary::collective {

// One communicator a rank, sharing one group.
std::vector<std::unique_ptr<Communicator>> CreateInProcessGroup(int size, uint64_t epoch);

}  // namespace tributary::collective
