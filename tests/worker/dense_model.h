// The oracle of the worker's tests: attention in float64 over a dense copy of each sequence.
//
// Nothing of the code under test is used: no pages, no slots, no key ranges, no partials. A key is
// visible or not by comparing positions, one at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/cache_spec.h"

namespace tributary::worker::testing {

// K and V of one layer of one sequence.
struct DenseLayer {
  // [tokens, kv_heads, key_dim or value_dim] of the layer, as the host gave them, and as the cache
  // gives them back.
  std::vector<float> k, v;
  std::vector<double> cached_k, cached_v;
};

// Appends tokens: `k` and `v` are [tokens, kv_heads, key_dim or value_dim], values of the input
// dtype.
void AppendDense(const CacheSpec& spec, const LayerSpec& layer, std::span<const float> k,
                 std::span<const float> v, DenseLayer* dense);
void TruncateDense(const CacheSpec& spec, const LayerSpec& layer, int64_t length,
                   DenseLayer* dense);
// Tokens that it holds.
int64_t LengthOfDense(const CacheSpec& spec, const LayerSpec& layer, const DenseLayer& dense);

struct DenseRow {
  const float* q = nullptr;  // [q_heads, key_dim]
  int64_t position = 0;
  // Keys from here on count as given, those before as the cache has them.
  int64_t given_from = 0;
  // Of a draft's block: it begins here, and all of `dense` from here on is it. -1: causal
  // attention.
  int64_t anchor = -1;
};

// Attention of one row under the layer's mask, causal or (with an anchor) DFlash's, sinks applied.
// o: [q_heads, value_dim]; lse: [q_heads], without the sink.
void DenseAttention(const CacheSpec& spec, const LayerSpec& layer, const DenseLayer& dense,
                    const DenseRow& row, double* o, double* lse);

}  // namespace tributary::worker::testing
