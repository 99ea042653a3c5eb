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

namespace tributary::worker {

class KvShard {
 public:
  // Takes addresses, for huge pages where the system gives them; the memory is taken by
  // TakePiece. kResourceExhausted, with the sizes, when it needs more than `available` bytes or
  // the system refuses. The spec is valid.
  static absl::StatusOr<std::unique_ptr<KvShard>> Create(const CacheSpec& spec, size_t available,
                                                         PageFill fill);
  ~KvShard();
  KvShard(const KvShard&) = delete;
  KvShard& operator=(const KvShard&) = delete;

  // Takes the memory of a piece, so that no later step finds out that it is not there; each once,
  // on any thread. No page is used before all are taken. Returns the piece's bytes.
  // kResourceExhausted when the system refuses.
  size_t pieces() const { return (bytes_ + kPieceBytes - 1) / kPieceBytes; }
  absl::StatusOr<size_t> TakePiece(size_t piece);

  // Valid as long as the shard.
  const PagedKv& layer(int32_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  int32_t num_layers() const { return static_cast<int32_t>(layers_.size()); }

  // Copies pages in order, each in all layers. The ids must exist.
  void CopyPages(const std::vector<PageCopy>& copies, cpu::ThreadPool& pool);

  // Reads and writes pages of all layers, layer by layer: [pages][page_bytes]. The ids must exist.
  size_t page_bytes() const { return page_bytes_; }
  void ReadPages(std::span<const int32_t> pages, std::byte* out, cpu::ThreadPool& pool) const;
  void WritePages(std::span<const int32_t> pages, const std::byte* in, cpu::ThreadPool& pool);

  // Bytes of the mapping that holds the pages.
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kPieceBytes = size_t{2} << 20;  // a huge page

  KvShard(const CacheSpec& spec, void* mapping, size_t mapped, size_t bytes, PageFill fill);

  void* mapping_;
  size_t mapped_;
  size_t bytes_;
  const PageFill fill_;
  std::byte* base_;            // where the first page begins
  size_t page_bytes_ = 0;      // of one page, all layers
  std::vector<float> scales_;  // per layer: k [its kv_heads], v [its kv_heads]
  std::vector<PagedKv> layers_;
};

}  // namespace tributary::worker
