// Tokens of a shard on their way between a GPU and host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/kv_geometry.h"
#include "worker/cache_spec.h"
#include "worker/cuda/plain_layout.h"
#include "worker/cuda/rank.h"

namespace tributary::worker {

// Kernels read and write pinned memory (PinHostMemory) over the bus as they go through the pages;
// what lies elsewhere is staged. They run in the rank's second stream, behind the steps before.
class RunCopier {
 public:
  // `pages`: of the first layer; those of the others follow. `rank` outlives this.
  RunCopier(CudaRank& rank, const CacheSpec& spec, std::byte* pages);

  // Shard::run_bytes, ReadRuns and WriteRuns.
  size_t run_bytes(int32_t slots) const { return layout_.RunBytes(slots); }
  absl::Status Read(std::span<const int64_t> first, int32_t slots, std::byte* out);
  absl::Status Write(std::span<const int64_t> first, int32_t slots, const std::byte* in);

 private:
  // Layers that follow each other and have the same geometry.
  struct Group {
    size_t first = 0;
    int32_t count = 0;
    KvGeometry geometry;
    std::byte* pages = nullptr;
    size_t layer_bytes = 0;
  };
  enum class Direction : uint8_t { kRead, kWrite };

  absl::Status Copy(Direction direction, std::span<const int64_t> first, int32_t slots,
                    std::byte* data);
  // Puts all layers into the stream. `slots_on_device`: [runs]; `plain`: where the GPU reaches it.
  absl::Status Launch(Direction direction, const int64_t* slots_on_device, int32_t runs,
                      int32_t slots, std::byte* plain) const;

  CudaRank& rank_;
  const PlainLayout layout_;
  const int32_t page_size_;
  std::vector<Group> groups_;
};

}  // namespace tributary::worker
