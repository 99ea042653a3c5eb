// Memory that a new cache takes while steps of others go on.
//
// A gigabyte takes a second of a processor to be cleared. Threads of low priority do that: a step
// finds the processors free, and no step waits for a page to be cleared.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "worker/host_memory_ledger.h"
#include "worker/kv_shard.h"

namespace tributary::worker {

// Used by one thread.
class MemoryTaker {
 public:
  // Will take all memory of the shard, which outlives it, on so many threads. The claim is to as
  // many bytes.
  MemoryTaker(KvShard& shard, std::unique_ptr<HostMemoryLedger::Claim> claim, int threads);
  // What has not been taken by now is not taken.
  ~MemoryTaker();
  MemoryTaker(const MemoryTaker&) = delete;
  MemoryTaker& operator=(const MemoryTaker&) = delete;

  // The first call begins, and takes the memory by itself where that is a single piece. Whether all
  // is taken; false: not yet, and the time is over. kResourceExhausted: the system refuses, or
  // others have brought the machine close to its end.
  absl::StatusOr<bool> Await(std::chrono::steady_clock::time_point until);

 private:
  // Starts the threads; false: the system gives none.
  bool Begin();
  // A thread's.
  void Run();
  // Takes the next piece; false: there is none to take, or it failed.
  bool TakeNext();

  KvShard& shard_;
  const int thread_count_;
  Mutex mutex_;
  CondVar over_;
  const std::unique_ptr<HostMemoryLedger::Claim> claim_ TRIBUTARY_GUARDED_BY(mutex_);
  size_t next_ TRIBUTARY_GUARDED_BY(mutex_) = 0;   // piece
  size_t taken_ TRIBUTARY_GUARDED_BY(mutex_) = 0;  // pieces
  bool stopped_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  absl::Status failed_ TRIBUTARY_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // none before the first Await
};

}  // namespace tributary::worker
