// The caches that the grids are made of, on CPUs and GPUs alike.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "worker/cache_spec.h"

namespace tributary::worker::testing {

// For a KV type that rotates with the rest of a grid, so that each meets each of it.
inline constexpr std::array<DType, 4> kKvDTypes = {DType::kBf16, DType::kFp8E4M3, DType::kF16,
                                                   DType::kFp8E5M2};

// ---- parts --------------------------------------------------------------------------------------

// Different in every head, so that a mixed-up head shows.
std::vector<float> SinksFor(int32_t q_heads);
std::vector<float> ScalesFor(int32_t kv_heads, float base);
void SetHeads(CacheSpec* spec, int32_t kv_heads, int32_t group, int32_t head_dim,
              int32_t value_dim = 0);
LayerSpec DraftLayer(Window window, WindowBase base, bool causal_block);

// ---- caches -------------------------------------------------------------------------------------

// Geometry with defaults that suit most tests.
CacheSpec SmallSpec();

// The same with pages as they are asked for, and half as many again.
CacheSpec PagedSpec(int32_t page_size, int32_t interleave, DType kv_dtype);

// A layer of every kind; the second and third differ from the first in the window alone.
CacheSpec BoundarySpec(int32_t page_size, int32_t interleave, DType kv_dtype);

// Two KV heads, scales of k by head and one of v.
CacheSpec GeometrySpec(DType kv_dtype, int32_t head_dim, int32_t group, int32_t value_dim = 0);

// Five heads of one group: over 3 ranks slices of 2, 2 and 1.
CacheSpec MaskSpec(int32_t window, bool sinks, float soft_cap);

// Two layers, one with a window.
CacheSpec LifecycleSpec(int32_t interleave);

// Two KiB of FP8 keys and values to a token, so that a GPU shares what forks of a few thousand
// tokens have alike.
CacheSpec ForksSpec(DType kv_dtype);

// Two layers of FP8, one with a window and sinks.
CacheSpec Fp8Spec(int32_t kv_heads, int32_t group, int32_t window);

// Alternating windows, a KV type per layer, and sinks and soft caps here and there. Its right
// windows and anchors are of DFlash only: no causal step may look at them.
CacheSpec EveryLayerTypeSpec();

// The same, queries rounded to FP8 where a layer's cache is FP8.
CacheSpec Fp8QueriesSpec();

// For drafts of heads whose slices, over 3 ranks, begin inside a group.
CacheSpec DraftSliceSpec(DType kv_dtype, int32_t head_dim, int32_t value_dim = 0);

// Layers with heads and head dims of their own, of all that the table of head dims serves, with
// windows, sinks, scales and KV types here and there.
CacheSpec LayersDifferSpec();

}  // namespace tributary::worker::testing
