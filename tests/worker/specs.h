// Parts of the specs that the grids are made of.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/cache_spec.h"

namespace tributary::worker::testing {

// Different in every head, so that a mixed-up head shows.
inline std::vector<float> SinksFor(int32_t q_heads) {
  std::vector<float> sinks;
  for (int32_t h = 0; h < q_heads; ++h) sinks.push_back(0.5f * static_cast<float>(h) - 1.0f);
  return sinks;
}

inline std::vector<float> ScalesFor(int32_t kv_heads, float base) {
  std::vector<float> scales;
  for (int32_t h = 0; h < kv_heads; ++h)
    scales.push_back(base * (1.0f + 0.25f * static_cast<float>(h)));
  return scales;
}

inline void SetHeads(CacheSpec* spec, int32_t kv_heads, int32_t group, int32_t head_dim) {
  spec->kv_heads = kv_heads;
  spec->q_heads = kv_heads * group;
  spec->head_dim = head_dim;
  spec->sm_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
}

}  // namespace tributary::worker::testing
