// Where the layers of a cache lie among tokens in plain order (kernels/cuda/append/plain_tokens.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/append/plain_tokens.h"
#include "worker/cache_spec.h"

namespace tributary::worker {

// Runs of slots are [layers][slots][bytes of a token in the layer]. A page is a run of all its
// slots, and that is the order in which pages of GPUs travel and are kept for other ranks.
struct PlainLayout {
  explicit PlainLayout(const CacheSpec& spec) {
    for (const LayerSpec& layer : spec.layers) {
      before.push_back(token_bytes);
      token_bytes += cuda::PlainTokenBytes(GeometryOf(spec, layer).kv);
    }
    before.push_back(token_bytes);
  }

  size_t RunBytes(int32_t slots) const { return token_bytes * static_cast<size_t>(slots); }
  // Of one token in one layer.
  size_t TokenBytes(size_t layer) const { return before[layer + 1] - before[layer]; }

  size_t token_bytes = 0;      // in all layers
  std::vector<size_t> before;  // [layers + 1]: in the layers ahead
};

}  // namespace tributary::worker
