// Memory that a new cache takes while steps of others go on (memory_threads.h).
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/host_memory_ledger.h"
#include "worker/memory_threads.h"
#include "worker/shard_memory.h"

namespace tributary::worker {

// Used by one thread, the one that adds to the threads.
class MemoryTaker {
 public:
  // Will take all of the memory. The claim is to as many bytes.
  MemoryTaker(std::shared_ptr<ShardMemory> memory, std::unique_ptr<HostMemoryLedger::Claim> claim,
              MemoryThreads& threads);
  // What has not been taken by now is not taken. A thread that is about to take a piece keeps the
  // memory until it has.
  ~MemoryTaker();
  MemoryTaker(const MemoryTaker&) = delete;
  MemoryTaker& operator=(const MemoryTaker&) = delete;

  // The first call begins, and takes the memory by itself where that is a single piece. Whether all
  // is taken; false: not yet, and the time is over. kResourceExhausted: others have brought the
  // machine close to its end, or the system gives no thread.
  absl::StatusOr<bool> Await(std::chrono::steady_clock::time_point until);

 private:
  class Pieces;

  const std::shared_ptr<Pieces> pieces_;
  MemoryThreads& threads_;
  bool begun_ = false;
};

}  // namespace tributary::worker
