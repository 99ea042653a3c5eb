// The geometry of one model's cache: what the coordinator and every worker agree on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/dtype.h"
#include "kernels/key_range.h"
#include "kernels/kv_geometry.h"
#include "kernels/row_mask.h"

namespace tributary::worker {

// What a cache may have at most.
inline constexpr int32_t kMaxLayers = 1024;
inline constexpr int32_t kMaxKvHeads = 1024;

// What may differ from layer to layer of a cache.
struct LayerSpec {
  // The layer's own heads and dimensions, where layers differ. 0 means the cache's. A layer that
  // states head_dim and not value_head_dim has values of as many dimensions as its keys.
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t value_head_dim = 0;
  float sm_scale = 0.0f;  // 0: the cache's
  Window window;          // causal attention uses `left` only
  // For DFlash attention: what the window is laid around, and whether rows of a block see no rows
  // after them.
  WindowBase window_base = WindowBase::kQuery;
  bool causal_block = false;
  std::vector<float> sinks;       // [q_heads of the layer] logits, or empty for none
  std::optional<DType> kv_dtype;  // absent: the cache's
  std::optional<float> soft_cap;  // absent: the cache's
  // What a stored element is multiplied by; one value (per tensor) or [kv_heads of
  // the layer].
  std::vector<float> k_scale = {1.0f};
  std::vector<float> v_scale = {1.0f};
  // What an element of an FP8 or NVFP4 output is multiplied by, where the call does not say.
  float o_scale = 1.0f;
};

struct CacheSpec {
  int32_t q_heads = 0;
  int32_t kv_heads = 0;  // q_heads % kv_heads == 0, q_heads / kv_heads <= kMaxGqaRatio
  // Dimensions of keys and queries, and of values and outputs; 0: the same as head_dim. Together
  // they are a row of kernels/head_dims.h.
  int32_t head_dim = 0;
  int32_t value_head_dim = 0;
  int32_t page_size = 16;  // 16, 32, 64 or 128 local slots
  int32_t interleave = 0;  // tokens; divides page_size
  DType kv_dtype = DType::kFp8E4M3;
  float sm_scale = 0.0f;     // resolved: never 0 here
  float soft_cap = 0.0f;     // 0 for none
  bool fp8_queries = false;  // queries are rounded to FP8 where the cache is FP8
  bool fp8_weights = false;  // weights of prompts may be rounded, too; needs fp8_queries
  // Virtual pages of the cache: each stands for page_size * N tokens, one physical page of all
  // layers on every rank.
  int32_t num_pages = 0;
  // Where this is more than 0, rank (r + replica_stride) % N also keeps the pages of rank r, in
  // host memory (worker/replica.h).
  int32_t replica_stride = 0;
  std::vector<LayerSpec> layers;  // one per layer
};

// Heads, dimensions and scale of one layer.
struct LayerGeometry {
  int32_t q_heads = 0;
  KvGeometry kv;
  float sm_scale = 0.0f;

  int32_t gqa_ratio() const { return q_heads / kv.kv_heads; }
  bool operator==(const LayerGeometry&) const = default;
};

// What holds for a layer: its own value, or else the cache's.
LayerGeometry GeometryOf(const CacheSpec& spec, const LayerSpec& layer);
DType KvDType(const CacheSpec& spec, const LayerSpec& layer);
float SoftCap(const CacheSpec& spec, const LayerSpec& layer);
// Whether queries are rounded to FP8 before they meet a layer's cache of that type.
bool RoundsQueries(const CacheSpec& spec, DType kv_dtype);

// Checks every limit of tributary.v1.CacheSpec. kInvalidArgument with the field
// (base/status/errors.h), in the API's spelling: num_pages is "capacity_tokens", layers[i] is
// "layer_specs[i]". Says nothing of whether a backend supports the geometry or the memory is there.
absl::Status ValidateCacheSpec(const CacheSpec& spec);

// Whether two specs mean the same cache; a scale given once equals the same scale given per head.
bool SameSpec(const CacheSpec& a, const CacheSpec& b);

// Bytes that a rank needs for the pages of all layers. kInvalidArgument ("capacity_tokens") when
// the product leaves 63 bits. The spec must be valid otherwise.
absl::StatusOr<size_t> ShardBytes(const CacheSpec& spec);

// kResourceExhausted: those bytes are not to be had.
absl::Status ShardOutOfMemory(size_t needed, absl::string_view why);

}  // namespace tributary::worker
