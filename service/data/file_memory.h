// Memory of the machine for a file without a disk (an object of shared memory, a memfd).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace tributary::service {

// Takes memory for `bytes` bytes of the file from `begin` on, piece by piece. `missing`: how many
// of them have none yet. `available` returns the bytes that the machine would still give.
// kResourceExhausted, with the reason: the machine cannot hold all that is missing, and then
// nothing is taken; or others have taken its memory meanwhile, or the system refuses.
absl::Status TakeFileMemory(int file, uint64_t begin, uint64_t bytes, uint64_t missing,
                            const std::function<size_t()>& available);

}  // namespace tributary::service
