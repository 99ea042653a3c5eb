// The geometry of one model's cache: what the coordinator and every worker agree on.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/key_range.h"

namespace tributary::worker {

// What may differ from layer to layer.
struct LayerSpec {
  Window window;             // causal layers use `left` only
  std::vector<float> sinks;  // [q_heads] logits, or empty for none
  // What a stored element is multiplied by; one value (per tensor) or [kv_heads].
  std::vector<float> k_scale = {1.0f};
  std::vector<float> v_scale = {1.0f};
};

struct CacheSpec {
  int32_t q_heads = 0;
  int32_t kv_heads = 0;    // q_heads % kv_heads == 0, q_heads / kv_heads <= 16
  int32_t head_dim = 0;    // 64, 128 or 256
  int32_t page_size = 16;  // 16, 32, 64 or 128 local slots
  int32_t interleave = 0;  // tokens; divides page_size
  DType kv_dtype = DType::kFp8E4M3;
  float sm_scale = 0.0f;  // resolved: never 0 here
  float soft_cap = 0.0f;  // 0 for none
  // Virtual pages of the cache: each stands for page_size * N tokens, one physical page of all layers
  // on every rank.
  int32_t num_pages = 0;
  std::vector<LayerSpec> layers;  // one a layer
};

}  // namespace tributary::worker
