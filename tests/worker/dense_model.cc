#include "tests/worker/dense_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kernels/element.h"
#include "kernels/fp8_queries.h"

namespace tributary::worker::testing {
namespace {

double ScaleOf(const std::vector<float>& scale, int32_t head) {
  return scale[scale.size() == 1 ? 0 : static_cast<size_t>(head)];
}

// What a value is after it went through the cache.
double ThroughCache(DType dtype, float value, double scale) {
  unsigned char stored[4] = {};
  StoreElement(dtype, stored, 0, value / static_cast<float>(scale));
  return static_cast<double>(LoadElement(dtype, stored, 0)) * scale;
}

// What a block of 16 numbers is after it went through an NVFP4 cache, as types.proto says.
void BlockThroughCache(std::span<const float> block, float scale, std::vector<double>* cached) {
  float largest = 0;
  for (const float x : block) largest = std::max(largest, std::fabs(x));
  unsigned char stored = 0;
  StoreElement(DType::kFp8E4M3, &stored, 0, largest / (6.0f * scale));
  const float block_scale = LoadElement(DType::kFp8E4M3, &stored, 0);
  for (const float x : block) {
    unsigned char element = 0;
    if (block_scale != 0) StoreElement(DType::kNvfp4, &element, 0, x / (block_scale * scale));
    const double number = LoadElement(DType::kNvfp4, &element, 0);
    cached->push_back(number * static_cast<double>(block_scale) * static_cast<double>(scale));
  }
}

// `dim` elements to a head.
void Quantise(const KvGeometry& g, int32_t dim, const std::vector<float>& scale,
              std::span<const float> given, std::vector<double>* cached) {
  if (g.dtype == DType::kNvfp4) {
    for (size_t i = 0; i < given.size(); i += kNvfp4Block) {
      const auto head =
          static_cast<int32_t>(i / static_cast<size_t>(dim) % static_cast<size_t>(g.kv_heads));
      BlockThroughCache(given.subspan(i, kNvfp4Block), static_cast<float>(ScaleOf(scale, head)),
                        cached);
    }
    return;
  }
  for (size_t i = 0; i < given.size(); ++i) {
    const auto head =
        static_cast<int32_t>(i / static_cast<size_t>(dim) % static_cast<size_t>(g.kv_heads));
    cached->push_back(ThroughCache(g.dtype, given[i], ScaleOf(scale, head)));
  }
}

bool Visible(const LayerSpec& layer, const DenseRow& row, int64_t key) {
  const Window& window = layer.window;
  if (row.anchor < 0) {
    return key <= row.position && (window.left < 0 || key >= row.position - window.left);
  }
  if (layer.causal_block && key > row.position) return false;
  const int64_t base = layer.window_base == WindowBase::kAnchor ? row.anchor : row.position;
  return (window.left < 0 || base - key <= window.left) &&
         (window.right < 0 || key - base <= window.right);
}

template <typename Key>
double Dot(const float* q, const Key* key, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(q[d]) * static_cast<double>(key[d]);
  return sum;
}

template <typename Value>
void AddWeighted(double weight, const Value* value, int64_t dim, double* sum) {
  for (int64_t d = 0; d < dim; ++d) sum[d] += weight * static_cast<double>(value[d]);
}

}  // namespace

void AppendDense(const CacheSpec& spec, const LayerSpec& layer, std::span<const float> k,
                 std::span<const float> v, DenseLayer* dense) {
  dense->k.insert(dense->k.end(), k.begin(), k.end());
  dense->v.insert(dense->v.end(), v.begin(), v.end());
  const KvGeometry g = GeometryOf(spec, layer).kv;
  Quantise(g, g.key_dim, layer.k_scale, k, &dense->cached_k);
  Quantise(g, g.value_dim, layer.v_scale, v, &dense->cached_v);
}

void TruncateDense(const CacheSpec& spec, const LayerSpec& layer, int64_t length,
                   DenseLayer* dense) {
  const KvGeometry g = GeometryOf(spec, layer).kv;
  const auto heads = static_cast<size_t>(length * g.kv_heads);
  dense->k.resize(heads * static_cast<size_t>(g.key_dim));
  dense->v.resize(heads * static_cast<size_t>(g.value_dim));
  dense->cached_k.resize(dense->k.size());
  dense->cached_v.resize(dense->v.size());
}

int64_t LengthOfDense(const CacheSpec& spec, const LayerSpec& layer, const DenseLayer& dense) {
  const KvGeometry g = GeometryOf(spec, layer).kv;
  return static_cast<int64_t>(dense.k.size()) / (g.kv_heads * g.key_dim);
}

void DenseAttention(const CacheSpec& spec, const LayerSpec& layer, const DenseLayer& dense,
                    const DenseRow& row, double* o, double* lse) {
  const LayerGeometry g = GeometryOf(spec, layer);
  const int64_t key_dim = g.kv.key_dim;
  const int64_t value_dim = g.kv.value_dim;
  const double soft_cap = layer.soft_cap.has_value() ? *layer.soft_cap : spec.soft_cap;
  const int64_t keys = LengthOfDense(spec, layer, dense);
  std::vector<float> rounded;
  if (RoundsQueries(spec, g.kv.dtype)) {
    const auto elements = static_cast<size_t>(g.q_heads * key_dim);
    rounded.resize(elements);
    RoundQueriesToFp8(DType::kF32, g.kv.key_dim, std::as_bytes(std::span(row.q, elements)),
                      rounded.data());
  }
  for (int32_t head = 0; head < g.q_heads; ++head) {
    const int32_t kv_head = head / g.gqa_ratio();
    const float* q = row.q + head * key_dim;
    const float* cached_q = rounded.empty() ? q : rounded.data() + head * key_dim;
    double* out = o + head * value_dim;
    std::fill_n(out, value_dim, 0.0);
    const auto offset = [&](int64_t key, int64_t dim) {
      return static_cast<size_t>((key * g.kv.kv_heads + kv_head) * dim);
    };
    std::vector<std::pair<int64_t, double>> logits;
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t key = 0; key < keys; ++key) {
      if (!Visible(layer, row, key)) continue;
      const size_t at = offset(key, key_dim);
      double logit = key >= row.given_from ? Dot(q, &dense.k[at], key_dim)
                                           : Dot(cached_q, &dense.cached_k[at], key_dim);
      logit *= g.sm_scale;
      if (soft_cap > 0) logit = soft_cap * std::tanh(logit / soft_cap);
      logits.emplace_back(key, logit);
      max = std::max(max, logit);
    }
    double sum = 0;
    for (const auto& [key, logit] : logits) {
      const double weight = std::exp(logit - max);
      const size_t at = offset(key, value_dim);
      if (key >= row.given_from) {
        AddWeighted(weight, &dense.v[at], value_dim, out);
      } else {
        AddWeighted(weight, &dense.cached_v[at], value_dim, out);
      }
      sum += weight;
    }
    lse[head] = max + std::log(sum);
    double denominator = sum;
    if (!layer.sinks.empty()) {
      denominator += std::exp(static_cast<double>(layer.sinks[static_cast<size_t>(head)]) - max);
    }
    for (int64_t d = 0; d < value_dim; ++d) out[d] /= denominator;
  }
}

}  // namespace tributary::worker::testing
