// Memory of a cache that is gone, given back while steps of others go on (memory_threads.h).
#pragma once

#include <memory>

#include "worker/host_memory_ledger.h"
#include "worker/memory_threads.h"
#include "worker/shard_memory.h"

namespace tributary::worker {

// Gives the memory back, which its caller is the last to use: at once where it is little, otherwise
// by the keeper of the threads. To unmap a gigabyte takes some milliseconds. Meanwhile it counts as
// available in the ledger, so that a cache that follows another one finds its room.
void GiveBack(std::shared_ptr<ShardMemory> memory, std::shared_ptr<HostMemoryLedger> ledger,
              MemoryThreads& threads);

}  // namespace tributary::worker
