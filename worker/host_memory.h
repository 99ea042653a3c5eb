// How much memory this process could still take.
#pragma once

#include <cstddef>

namespace tributary::worker {

// The least of what the machine and the control group (v2) would give; SIZE_MAX when neither says.
size_t AvailableHostMemory();

}  // namespace tributary::worker
