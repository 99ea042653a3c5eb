#include "kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "kernels/element.h"
#include "kernels/lse.h"
#include "kernels/nvfp4.h"

namespace tributary {
namespace {

using Vector = std::vector<double>;

// `dim` elements, the first of which is element `row` * `dim` of the data.
Vector LoadRow(DType type, const void* data, size_t row, int32_t dim) {
  Vector x(dim);
  for (int32_t d = 0; d < dim; ++d) x[d] = LoadElement(type, data, row * dim + d);
  return x;
}

// The keys (or values) of one head of one sequence as the real numbers they stand for. Reads a slot
// when it is first asked for and never another.
class Rows {
 public:
  explicit Rows(std::function<Vector(int64_t slot)> read) : read_(std::move(read)) {}
  const Vector& operator[](int64_t slot) {
    if (slot >= static_cast<int64_t>(rows_.size())) rows_.resize(slot + 1);
    if (rows_[slot].empty()) rows_[slot] = read_(slot);
    return rows_[slot];
  }

 private:
  std::function<Vector(int64_t slot)> read_;
  std::vector<Vector> rows_;
};

// Softmax attention of one query vector over keys [range.lo, range.hi), by the textbook: all the
// logits, their maximum, the exponentials, the weighted mean.
void AttendRow(const Vector& q, KeyRange range, Rows& keys, Rows& values, double sm_scale,
               double soft_cap, std::span<double> o, double* lse) {
  std::fill(o.begin(), o.end(), 0.0);
  *lse = EmptyLse<double>();
  Vector logits;
  double max = EmptyLse<double>();
  for (int64_t slot = range.lo; slot < range.hi; ++slot) {
    const Vector& k = keys[slot];
    double logit = 0;
    for (size_t d = 0; d < q.size(); ++d) logit += q[d] * k[d];
    logit *= sm_scale;
    if (soft_cap > 0) logit = soft_cap * std::tanh(logit / soft_cap);
    logits.push_back(logit);
    max = std::max(max, logit);
  }
  // No keys, or none with a weight: the identity, so that merging it changes nothing.
  if (std::all_of(logits.begin(), logits.end(), [](double x) { return x == EmptyLse<double>(); })) {
    return;
  }
  double sum = 0;
  for (int64_t slot = range.lo; slot < range.hi; ++slot) {
    const double weight = std::exp(logits[slot - range.lo] - max);
    const Vector& v = values[slot];
    for (size_t d = 0; d < o.size(); ++d) o[d] += weight * v[d];
    sum += weight;
  }
  for (double& element : o) element /= sum;
  *lse = max + std::log(sum);
}

// One head's keys (or values) of one sequence, dequantised.
Rows PagedRows(const PagedKv& kv, const AttentionEntry& entry, int32_t head, bool values) {
  return Rows([=, &kv, &entry](int64_t slot) {
    const int32_t page = entry.pages[slot / kv.page_size];
    const int32_t in_page = static_cast<int32_t>(slot % kv.page_size);
    const std::byte* row =
        values ? ValueRow(kv, page, head, in_page) : KeyRow(kv, page, head, in_page);
    const float* scales = values ? kv.v_scale : kv.k_scale;
    Vector x =
        LoadRow(kv.geometry.dtype, row, 0, values ? kv.geometry.value_dim : kv.geometry.key_dim);
    if (kv.geometry.dtype == DType::kNvfp4) {
      const std::byte* blocks =
          values ? ValueScales(kv, page, head, in_page) : KeyScales(kv, page, head, in_page);
      for (size_t d = 0; d < x.size(); ++d) {
        x[d] *= FloatFromFloat8E4M3(std::to_integer<uint8_t>(blocks[d / kNvfp4Block]));
      }
    }
    if (scales != nullptr) {
      for (double& element : x) element *= scales[head];
    }
    return x;
  });
}

// Row `row` of `dim` elements, block by block as kernels/nvfp4.h says.
void StoreNvfp4(DType from_type, const void* from, size_t row, int32_t dim, float tensor_scale,
                std::byte* to, std::byte* block_scales) {
  for (int32_t first = 0; first < dim; first += kNvfp4Block) {
    float x[kNvfp4Block];
    uint32_t largest = 0;
    for (int32_t i = 0; i < kNvfp4Block; ++i) {
      x[i] = LoadElement(from_type, from, row * dim + first + i);
      largest = std::max(largest, MagnitudeBits(x[i]));
    }
    const uint8_t scale = Nvfp4BlockScale(largest, tensor_scale);
    block_scales[first / kNvfp4Block] = std::byte{scale};
    const float divisor = Nvfp4Divisor(scale, tensor_scale);
    for (int32_t i = 0; i < kNvfp4Block; i += 2) {
      const uint32_t low = Nvfp4Element(x[i], divisor);
      const uint32_t high = Nvfp4Element(x[i + 1], divisor);
      to[(first + i) / 2] = static_cast<std::byte>(low | high << 4);
    }
  }
}

Rows DenseRows(const void* data, int32_t dim, const NewTokensParams& p, int32_t first_row,
               int32_t head) {
  return Rows([=, &p](int64_t slot) {
    return LoadRow(p.kv_dtype, data, size_t(first_row + slot) * p.kv_heads + head, dim);
  });
}

}  // namespace

ReferenceResult ReferenceAttention(const AttentionParams& p) {
  const KvGeometry& g = p.kv.geometry;
  const auto dim = static_cast<size_t>(g.value_dim);
  ReferenceResult result{Vector(size_t(p.rows) * p.q_heads * dim),
                         Vector(size_t(p.rows) * p.q_heads)};
  const int32_t gqa_ratio = p.q_heads / g.kv_heads;
  for (const AttentionEntry& entry : p.entries) {
    for (int32_t kv_head = 0; kv_head < g.kv_heads; ++kv_head) {
      Rows keys = PagedRows(p.kv, entry, kv_head, /*values=*/false);
      Rows values = PagedRows(p.kv, entry, kv_head, /*values=*/true);
      for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
        for (int32_t head = kv_head * gqa_ratio; head < (kv_head + 1) * gqa_ratio; ++head) {
          const size_t at = size_t(row) * p.q_heads + head;
          AttendRow(LoadRow(p.q_dtype, p.q, at, g.key_dim), p.keys[row], keys, values, p.sm_scale,
                    p.soft_cap, std::span(result.o).subspan(at * dim, dim), &result.lse[at]);
        }
      }
    }
  }
  return result;
}

ReferenceResult ReferenceNewTokens(const NewTokensParams& p) {
  const auto dim = static_cast<size_t>(p.value_dim);
  ReferenceResult result{Vector(size_t(p.rows) * p.head_count * dim),
                         Vector(size_t(p.rows) * p.head_count)};
  const int32_t gqa_ratio = p.q_heads / p.kv_heads;
  for (const NewTokensEntry& entry : p.entries) {
    for (int32_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      Rows keys = DenseRows(p.k, p.key_dim, p, entry.row_begin, kv_head);
      Rows values = DenseRows(p.v, p.value_dim, p, entry.row_begin, kv_head);
      for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
        for (int32_t i = 0; i < p.head_count; ++i) {
          const int32_t head = p.head_begin + i;
          if (head / gqa_ratio != kv_head) continue;
          const size_t at = size_t(row) * p.head_count + i;
          AttendRow(LoadRow(p.q_dtype, p.q, size_t(row) * p.q_heads + head, p.key_dim), p.keys[row],
                    keys, values, p.sm_scale, p.soft_cap,
                    std::span(result.o).subspan(at * dim, dim), &result.lse[at]);
        }
      }
    }
  }
  return result;
}

ReferenceResult ReferenceMerge(const MergeParams& p) {
  ReferenceResult result{Vector(size_t(p.rows) * p.heads * p.value_dim),
                         Vector(size_t(p.rows) * p.heads)};
  for (size_t at = 0; at < result.lse.size(); ++at) {
    double* o = &result.o[at * p.value_dim];
    double lse = EmptyLse<double>();
    for (size_t s = 0; s < p.o.size(); ++s) {
      const double source_lse = p.lse[s][at];
      if (source_lse == EmptyLse<double>()) continue;
      const MergeWeights<double> w = Merge(lse, source_lse);
      for (int32_t d = 0; d < p.value_dim; ++d) {
        o[d] = w.a * o[d] + w.b * p.o[s][at * p.value_dim + d];
      }
      lse = w.lse;
    }
    result.lse[at] = lse;
    if (p.sinks == nullptr || lse == EmptyLse<double>()) continue;
    const double scale = SinkScale<double>(lse, p.sinks[at % p.heads]);
    for (int32_t d = 0; d < p.value_dim; ++d) o[d] *= scale;
  }
  return result;
}

void ReferenceAppend(const AppendParams& p) {
  const PagedKv& kv = p.kv;
  const KvGeometry& g = kv.geometry;
  const auto store = [&](const void* from, size_t row, int32_t dim, float scale, std::byte* to,
                         std::byte* block_scales) {
    if (g.dtype == DType::kNvfp4) {
      return StoreNvfp4(p.input_dtype, from, row, dim, scale, to, block_scales);
    }
    for (int32_t d = 0; d < dim; ++d) {
      StoreElement(g.dtype, to, d, LoadElement(p.input_dtype, from, row * dim + d) / scale);
    }
  };
  for (int32_t t = 0; t < p.tokens; ++t) {
    if (p.slots[t] == kPadSlot) continue;
    const int32_t page = static_cast<int32_t>(p.slots[t] / kv.page_size);
    const int32_t slot = static_cast<int32_t>(p.slots[t] % kv.page_size);
    for (int32_t h = 0; h < g.kv_heads; ++h) {
      const size_t row = size_t(t) * g.kv_heads + h;
      store(p.k, row, g.key_dim, kv.k_scale == nullptr ? 1.0f : kv.k_scale[h],
            KeyRow(kv, page, h, slot), KeyScales(kv, page, h, slot));
      store(p.v, row, g.value_dim, kv.v_scale == nullptr ? 1.0f : kv.v_scale[h],
            ValueRow(kv, page, h, slot), ValueScales(kv, page, h, slot));
    }
  }
}

}  // namespace tributary
