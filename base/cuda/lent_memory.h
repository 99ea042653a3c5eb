// Memory of a GPU that one part of a process lends to another: the mailbox of a session, to a host
// in the service's own process. CUDA opens no handle in the process that made it, so such a host is
// told the address (device_memory.h, ProcessNonce). With that it takes a share of the memory here,
// as a mapping would give a host of another process: the memory stays until both have let go.
//
// There is one table of such memory per process, because the two parts know nothing of each other
// but the address. Any thread may call these functions.
#pragma once

#include <functional>
#include <memory>

namespace tributary::cuda {

// Memory that begins at `address` may be shared from now on. It is given back by free(address),
// which the thread calls that drops the last share; the first share is returned.
std::shared_ptr<void> LendMemory(void* address, std::function<void(void*)> free);

// A share of memory that is lent. Null: none is that begins at `address`, or no longer.
std::shared_ptr<void> ShareOfLentMemory(const void* address);

}  // namespace tributary::cuda
