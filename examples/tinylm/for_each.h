// Items shared out over threads that mostly wait for a service.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace tributary::tinylm {

// Calls `work` with every item in 0 .. items - 1, and with the thread, in 0 .. threads - 1, that it
// is called on; a thread takes the next item as soon as it is done with one. After an error no item
// is begun any more, and the first one is returned.
absl::Status ForEach(int64_t items, int threads,
                     const std::function<absl::Status(int64_t item, int thread)>& work);

}  // namespace tributary::tinylm
