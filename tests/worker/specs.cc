#include "tests/worker/specs.h"

#include <cmath>

#include "kernels/head_dims.h"

namespace tributary::worker::testing {

std::vector<float> SinksFor(int32_t q_heads) {
  std::vector<float> sinks;
  for (int32_t h = 0; h < q_heads; ++h) sinks.push_back(0.5f * static_cast<float>(h) - 1.0f);
  return sinks;
}

std::vector<float> ScalesFor(int32_t kv_heads, float base) {
  std::vector<float> scales;
  for (int32_t h = 0; h < kv_heads; ++h)
    scales.push_back(base * (1.0f + 0.25f * static_cast<float>(h)));
  return scales;
}

void SetHeads(CacheSpec* spec, int32_t kv_heads, int32_t group, int32_t head_dim,
              int32_t value_dim) {
  spec->kv_heads = kv_heads;
  spec->q_heads = kv_heads * group;
  spec->head_dim = head_dim;
  spec->value_head_dim = value_dim;
  spec->sm_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
}

LayerSpec DraftLayer(Window window, WindowBase base, bool causal_block) {
  LayerSpec layer;
  layer.window = window;
  layer.window_base = base;
  layer.causal_block = causal_block;
  return layer;
}

CacheSpec SmallSpec() {
  CacheSpec spec;
  spec.q_heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 64;
  spec.page_size = 16;
  spec.interleave = 16;
  spec.kv_dtype = DType::kBf16;
  spec.sm_scale = 0.125f;
  spec.num_pages = 64;
  spec.layers.resize(1);
  return spec;
}

CacheSpec PagedSpec(int32_t page_size, int32_t interleave, DType kv_dtype) {
  CacheSpec spec = SmallSpec();
  spec.page_size = page_size;
  spec.interleave = interleave;
  spec.kv_dtype = kv_dtype;
  spec.num_pages = 96;
  return spec;
}

CacheSpec BoundarySpec(int32_t page_size, int32_t interleave, DType kv_dtype) {
  CacheSpec spec = PagedSpec(page_size, interleave, kv_dtype);
  spec.layers.resize(3);
  spec.layers[1].window.left = 3;
  spec.layers[2].window.left = 20;
  spec.layers[2].sinks = SinksFor(spec.q_heads);
  return spec;
}

CacheSpec GeometrySpec(DType kv_dtype, int32_t head_dim, int32_t group, int32_t value_dim) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/2, group, head_dim, value_dim);
  spec.kv_dtype = kv_dtype;
  spec.interleave = 4;
  spec.layers[0].k_scale = ScalesFor(spec.kv_heads, 0.02f);
  spec.layers[0].v_scale = {0.03f};
  return spec;
}

CacheSpec MaskSpec(int32_t window, bool sinks, float soft_cap) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/1, /*group=*/5, /*head_dim=*/64);
  spec.interleave = 8;
  spec.soft_cap = soft_cap;
  spec.layers[0].window.left = window;
  if (sinks) spec.layers[0].sinks = SinksFor(spec.q_heads);
  return spec;
}

CacheSpec LifecycleSpec(int32_t interleave) {
  CacheSpec spec = SmallSpec();
  spec.interleave = interleave;
  spec.layers.resize(2);
  spec.layers[1].window.left = 11;
  return spec;
}

CacheSpec ForksSpec(DType kv_dtype) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 8, 2, 128);
  spec.kv_dtype = kv_dtype;
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  spec.num_pages = 512;
  return spec;
}

CacheSpec Fp8Spec(int32_t kv_heads, int32_t group, int32_t window) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, kv_heads, group, /*head_dim=*/128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers.resize(2);
  spec.layers[1].window.left = window;
  spec.layers[1].sinks = SinksFor(spec.q_heads);
  return spec;
}

CacheSpec EveryLayerTypeSpec() {
  CacheSpec spec = SmallSpec();
  spec.interleave = 8;
  spec.layers.assign(6, {});
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (i % 2 == 0) spec.layers[i].window.left = 12;
    spec.layers[i].kv_dtype = kKvDTypes[i % kKvDTypes.size()];
    if (i % 3 == 0) spec.layers[i].sinks = SinksFor(spec.q_heads);
    if (i % 3 == 1) spec.layers[i].soft_cap = 2.0f;
    spec.layers[i].window.right = 1;
    spec.layers[i].window_base = WindowBase::kAnchor;
  }
  return spec;
}

CacheSpec Fp8QueriesSpec() {
  CacheSpec spec = EveryLayerTypeSpec();
  spec.fp8_queries = true;
  return spec;
}

CacheSpec DraftSliceSpec(DType kv_dtype, int32_t head_dim, int32_t value_dim) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/2, /*group=*/5, head_dim, value_dim);
  spec.kv_dtype = kv_dtype;
  spec.interleave = 4;
  spec.layers = {DraftLayer({30, 30}, WindowBase::kQuery, false)};
  spec.layers[0].k_scale = {0.02f, 0.03f};
  spec.layers[0].v_scale = {0.04f};
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  return spec;
}

CacheSpec LayersDifferSpec() {
  CacheSpec spec = SmallSpec();  // 4 query heads, 2 KV heads, dim 64
  spec.interleave = 4;
  for (const HeadDims& dims : kHeadDims) {
    const size_t i = spec.layers.size() - 1;
    LayerSpec layer;
    layer.head_dim = dims.key_dim;
    layer.value_head_dim = dims.value_dim == dims.key_dim ? 0 : dims.value_dim;
    layer.sm_scale = 1.0f / std::sqrt(static_cast<float>(dims.key_dim));
    layer.kv_dtype = kKvDTypes[i % kKvDTypes.size()];
    layer.kv_heads = 1 + static_cast<int32_t>(i % 3);
    layer.q_heads = layer.kv_heads * (1 + static_cast<int32_t>(i % 4));
    if (i % 2 == 0) layer.window.left = 14;
    if (i % 3 == 1) layer.sinks = SinksFor(layer.q_heads);
    if (i % 3 == 2) layer.k_scale = ScalesFor(layer.kv_heads, 0.05f);
    spec.layers.push_back(layer);
  }
  return spec;
}

}  // namespace tributary::worker::testing
