// The pages of one rank's share of a cache, all layers in one block of host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/paged_kv.h"
#include "worker/backend.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/shard_memory.h"

namespace tributary::worker {

class KvShard {
 public:
  // Takes addresses (ShardMemory::Create); no page is used before all of memory() is taken. The
  // spec is valid.
  static absl::StatusOr<std::unique_ptr<KvShard>> Create(const CacheSpec& spec, size_t available,
                                                         PageFill fill);
  KvShard(const KvShard&) = delete;
  KvShard& operator=(const KvShard&) = delete;

  const std::shared_ptr<ShardMemory>& memory() const { return memory_; }

  // Valid as long as the shard.
  const PagedKv& layer(int32_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  int32_t num_layers() const { return static_cast<int32_t>(layers_.size()); }

  // Copies pages in order, each in all layers. The ids must exist.
  void CopyPages(const std::vector<PageCopy>& copies, cpu::ThreadPool& pool);

  // Reads and writes pages of all layers, layer by layer: [pages][page_bytes]. The ids must exist.
  size_t page_bytes() const { return page_bytes_; }
  void ReadPages(std::span<const int32_t> pages, std::byte* out, cpu::ThreadPool& pool) const;
  void WritePages(std::span<const int32_t> pages, const std::byte* in, cpu::ThreadPool& pool);

  // Reads and writes runs of slots, as Shard::ReadRuns and WriteRuns say.
  size_t run_bytes(int32_t slots) const;
  void ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out,
                cpu::ThreadPool& pool) const;
  void WriteRuns(std::span<const int64_t> first, int32_t slots, const std::byte* in,
                 cpu::ThreadPool& pool);

  // Bytes of the mapping that holds the pages.
  size_t bytes() const { return memory_->bytes(); }

 private:
  KvShard(const CacheSpec& spec, std::shared_ptr<ShardMemory> memory);

  int32_t page_size() const { return layers_.front().page_size; }

  const std::shared_ptr<ShardMemory> memory_;
  size_t page_bytes_ = 0;      // of one page, all layers
  std::vector<float> scales_;  // per layer: k [its kv_heads], v [its kv_heads]
  std::vector<PagedKv> layers_;
};

}  // namespace tributary::worker
