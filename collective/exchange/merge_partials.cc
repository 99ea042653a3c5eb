#include "collective/exchange/merge_partials.h"

#include <algorithm>

#include "kernels/lse.h"

namespace tributary::collective {
namespace {

void AddScaled(const float* o, float lse, float weight, size_t n, float* out) {
  if (lse == EmptyLse<float>()) return;
  for (size_t d = 0; d < n; ++d) out[d] += weight * o[d];
}

}  // namespace

float MergeWeightsOf(const float* lse, size_t stride, int n, float* weights) {
  UnionLse<float> of_all;
  for (int i = 0; i < n; ++i) of_all.See(lse[i * stride]);
  for (int i = 0; i < n; ++i) {
    weights[i] = of_all.WeightOf(lse[i * stride]);
    of_all.Add(weights[i]);
  }
  for (int i = 0; i < n; ++i) weights[i] = of_all.ShareOf(weights[i]);
  return of_all.Lse();
}

void Scale(const float* o, float lse, float weight, size_t n, float* out) {
  if (lse == EmptyLse<float>()) {
    std::fill(out, out + n, 0.0f);
    return;
  }
  for (size_t d = 0; d < n; ++d) out[d] = weight * o[d];
}

void ApplySink(float lse, float sink, size_t n, float* o) {
  if (lse == EmptyLse<float>()) return;
  const float scale = SinkScale(lse, sink);
  for (size_t d = 0; d < n; ++d) o[d] *= scale;
}

void MergeSources(const Sources& s, size_t rows, size_t heads, size_t value_dim, int ranks,
                  const float* sinks, float* weights, float* out, float* lse_out) {
  for (size_t row = 0; row < rows; ++row) {
    for (size_t h = 0; h < heads; ++h) {
      const size_t at = row * s.row_heads + h;
      const float* lse = s.lse + at;
      const float* o = s.o + at * value_dim;
      float* dst = out + (row * heads + h) * value_dim;
      const float merged = MergeWeightsOf(lse, s.rank_stride, ranks, weights);
      Scale(o, lse[0], weights[0], value_dim, dst);
      for (int r = 1; r < ranks; ++r) {
        AddScaled(o + r * s.rank_stride, lse[r * s.rank_stride], weights[r], value_dim, dst);
      }
      if (sinks != nullptr) ApplySink(merged, sinks[h], value_dim, dst);
      if (lse_out != nullptr) lse_out[row * heads + h] = merged;
    }
  }
}

}  // namespace tributary::collective
