// Gathers context from its pages into dense rows of keys and values, which is what the prefill
// kernels read. prefill.cc calls it once for every pass of a plan, ahead of the kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/kv_geometry.h"

namespace tributary::cuda {

// What of an FP8 cache is copied as it is, and not widened.
enum class KeptFp8 {
  kNothing,
  kKeys,
  // Values, too, transposed by KV tiles: v is [KV tiles, kv_heads, value_dim, keys_per_tile]. Of
  // every 16 keys, the one of slot s takes the row KeyRow(s) of layout/page_layout.h. So a thread
  // that holds weights of a product of the keys has those of consecutive slots.
  kKeysAndValues,
};

// All pointers are device pointers.
struct GatherArgs {
  const PrefillGather* gathers = nullptr;  // of one pass
  int32_t gather_count = 0;
  const int32_t* page_tables = nullptr;
  const std::byte* cache = nullptr;  // [num_pages, PageBytes]; page_layout.h says how
  KvGeometry geometry;               // of the cache; dimensions are multiples of 8
  DType compute = DType::kBf16;      // bf16 or f16; the cache's type when that has 16 bits
  int32_t page_size = 0;
  KeptFp8 kept = KeptFp8::kNothing;
  int32_t keys_per_tile = kGatherSlots;  // for KeptFp8::kKeysAndValues; divides kGatherSlots
  // [kGatherSlots * gather_count, kv_heads, key_dim] and [.., value_dim], without the cache's
  // scales. Slots that no row sees become zeros.
  std::byte* k = nullptr;
  std::byte* v = nullptr;
};
cudaError_t RunGatherPages(const GatherArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
