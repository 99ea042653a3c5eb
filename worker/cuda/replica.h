// Pages that a rank with a GPU keeps for another one: host memory that its GPU writes to.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/cuda/append/plain_tokens.h"
#include "worker/backend.h"
#include "worker/cuda/plain_layout.h"
#include "worker/host_memory_ledger.h"
#include "worker/memory_taker.h"
#include "worker/memory_threads.h"
#include "worker/shard_memory.h"

namespace tributary::worker {

// What the replicas of a rank share. Of host memory, and of threads that copy it.
struct ReplicaHost {
  ReplicaHost(int threads, std::shared_ptr<HostMemoryLedger> host_memory)
      : pool(threads), memory_threads(threads), ledger(std::move(host_memory)) {}

  cpu::ThreadPool pool;
  MemoryThreads memory_threads;
  const std::shared_ptr<HostMemoryLedger> ledger;
};

// Tokens lie in plain order (plain_layout.h), page by page. New ones are written by the step that
// writes the ward's (PlannedStep::replica), over the bus. All else is done by the host.
class CudaReplica final : public Shard {
 public:
  // See Backend::CreateReplica. `host` outlives it. The GPU is made the calling thread's wherever
  // memory is pinned.
  static absl::StatusOr<std::unique_ptr<Shard>> Create(ReplicaHost& host, int gpu,
                                                       const CacheSpec& spec, size_t available,
                                                       PageFill fill);
  // The GPU is through with what it was given.
  ~CudaReplica() override;

  size_t bytes() const override { return memory_->bytes(); }
  // Takes the memory and then pins it, a piece at a time.
  absl::StatusOr<bool> TakeMemory(std::chrono::steady_clock::time_point until) override;

  // Where a layer's tokens are written, as the GPU reaches it.
  cuda::PlainPages layer(int32_t index) const {
    const size_t before = layout_.before[static_cast<size_t>(index)];
    return {on_bus_ + before * static_cast<size_t>(page_size_), page_bytes()};
  }

  absl::Status CopyPages(const std::vector<PageCopy>& copies) override;
  size_t page_bytes() const override { return layout_.RunBytes(page_size_); }
  absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out) override;
  absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in) override;
  size_t run_bytes(int32_t slots) const override { return layout_.RunBytes(slots); }
  absl::Status ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out) override;
  absl::Status WriteRuns(std::span<const int64_t> first, int32_t slots,
                         const std::byte* in) override;
  absl::Status Run(const PlannedStep& step, StepResults* results) override;

 private:
  CudaReplica(ReplicaHost& host, int gpu, const CacheSpec& spec,
              std::shared_ptr<ShardMemory> memory, std::unique_ptr<HostMemoryLedger::Claim> claim);

  std::byte* Page(int32_t page) const {
    return memory_->data() + static_cast<size_t>(page) * page_bytes();
  }
  // Calls copy(kept, travelling, bytes), from several threads, for pieces of these pages or runs
  // that lie together on both sides. Bytes is std::byte or const std::byte.
  template <typename Bytes, typename Copy>
  void ForEachPiece(std::span<const int32_t> pages, Bytes* travelling, const Copy& copy) const;
  template <typename Bytes, typename Copy>
  void ForEachPiece(std::span<const int64_t> first, int32_t slots, Bytes* travelling,
                    const Copy& copy) const;

  ReplicaHost& host_;
  const int gpu_;
  const PlainLayout layout_;
  const int32_t page_size_;
  const std::shared_ptr<ShardMemory> memory_;
  std::unique_ptr<MemoryTaker> taker_;  // null: all is taken
  size_t pinned_ = 0;                   // bytes
  std::vector<std::byte*> pins_;
  std::byte* on_bus_ = nullptr;
};

}  // namespace tributary::worker
