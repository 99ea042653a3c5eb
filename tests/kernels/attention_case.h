// A paged cache with known contents, poison around them, and queries to ask of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/element.h"
#include "kernels/params.h"
#include "kernels/reference.h"
#include "tests/kernels/page_order.h"
#include "tests/support/poison.h"
#include "tests/support/random.h"

namespace tributary::test {

// n normally distributed numbers, rounded to `type`.
inline std::vector<std::byte> RandomTensor(DType type, size_t n, uint32_t seed,
                                           float deviation = 1.0f) {
  const std::vector<float> values = NormalValues(n, seed, deviation);
  std::vector<std::byte> data(BytesOf(type, n));
  for (size_t i = 0; i < n; ++i) StoreElement(type, data.data(), i, values[i]);
  return data;
}

struct AttentionShape {
  DType kv_dtype = DType::kBf16;
  DType q_dtype = DType::kBf16;
  int32_t head_dim = 64;
  int32_t value_dim = 0;  // 0: head_dim
  int32_t kv_heads = 2;
  int32_t group = 4;
  int32_t page_size = 16;
  float soft_cap = 0.0f;
  float q_deviation = 1.0f;
  bool scaled = false;  // k_scale and v_scale other than 1
  uint32_t seed = 1;

  int32_t ValueDim() const { return value_dim == 0 ? head_dim : value_dim; }
};

// Sequences, each with the ranges of its rows. Every slot that no row sees holds NaN, and every
// page of which no row sees a slot has a wild id.
class AttentionCase {
 public:
  AttentionCase(const AttentionShape& shape, const std::vector<std::vector<KeyRange>>& sequences)
      : shape_(shape) {
    for (const auto& rows : sequences) keys_.insert(keys_.end(), rows.begin(), rows.end());
    Build(sequences);
    q_ = RandomTensor(shape.q_dtype, keys_.size() * q_heads() * shape.head_dim, shape.seed + 7,
                      shape.q_deviation);
    o.resize(keys_.size() * q_heads() * shape.ValueDim());
    lse.resize(keys_.size() * q_heads());
    Poison(std::span(o));
    Poison(std::span(lse));
  }
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  int32_t q_heads() const { return shape_.kv_heads * shape_.group; }
  std::vector<int64_t> o_shape() const {
    return {int64_t(keys_.size()), q_heads(), shape_.ValueDim()};
  }
  std::vector<int64_t> lse_shape() const { return {int64_t(keys_.size()), q_heads()}; }

  AttentionParams params() {
    AttentionParams p;
    p.kv = kv_;
    p.q = q_.data();
    p.q_dtype = shape_.q_dtype;
    p.rows = static_cast<int32_t>(keys_.size());
    p.q_heads = q_heads();
    p.entries = entries_;
    p.keys = keys_.data();
    p.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    p.soft_cap = shape_.soft_cap;
    p.o = o.data();
    p.lse = lse.data();
    return p;
  }

  // The same for the reference, whose pages have another order.
  AttentionParams plain_params() {
    AttentionParams p = params();
    p.kv.base = plain_.data();
    return p;
  }

  // Reads an element of a value as the reference does, without v_scale.
  float Value(size_t sequence, int64_t slot, int32_t head, int32_t d) {
    const DType type = kv_.geometry.dtype;
    const bool nvfp4 = type == DType::kNvfp4;
    const float element =
        LoadElement(type, Plain(/*value=*/true, sequence, slot, head, d), nvfp4 ? d % 2 : 0);
    if (!nvfp4) return element;
    return element *
           LoadElement(DType::kFp8E4M3, PlainScale(/*value=*/true, sequence, slot, head, d), 0);
  }
  std::span<const int32_t> pages(size_t sequence) const { return page_tables_[sequence]; }
  std::vector<std::byte>& q() { return q_; }
  // Overwrites one element of a key or a value; of NVFP4, where x must be NaN, its block's scale.
  void Set(bool value, size_t sequence, int64_t slot, int32_t head, int32_t d, float x) {
    const int32_t page = page_tables_[sequence][slot / shape_.page_size];
    const auto token = static_cast<int32_t>(slot % shape_.page_size);
    if (kv_.geometry.dtype == DType::kNvfp4) {
      const size_t at = CpuBlockScale(kv_, value, page, head, token, d / kNvfp4Block);
      for (std::byte* scale : {PlainScale(value, sequence, slot, head, d), &memory_[at]}) {
        StoreElement(DType::kFp8E4M3, scale, 0, x);
      }
      return;
    }
    StoreElement(kv_.geometry.dtype, Plain(value, sequence, slot, head, d), 0, x);
    const size_t at = CpuPlace(kv_, value, page, head, token, d).byte;
    StoreElement(kv_.geometry.dtype, &memory_[at], 0, x);
  }

  std::vector<float> o;
  std::vector<float> lse;

 private:
  void Build(const std::vector<std::vector<KeyRange>>& sequences) {
    // Which slots of which sequence are live.
    std::vector<std::vector<char>> live(sequences.size());
    int32_t pages = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      int64_t end = 0;
      for (const KeyRange& range : sequences[s]) {
        if (!Empty(range)) end = std::max(end, range.hi);
      }
      live[s].resize(end);
      for (const KeyRange& range : sequences[s]) {
        for (int64_t slot = range.lo; slot < range.hi; ++slot) live[s][slot] = 1;
      }
      pages += static_cast<int32_t>((end + shape_.page_size - 1) / shape_.page_size);
    }
    kv_.num_pages = pages + 3;
    kv_.page_size = shape_.page_size;
    kv_.geometry = {.kv_heads = shape_.kv_heads,
                    .key_dim = shape_.head_dim,
                    .value_dim = shape_.ValueDim(),
                    .dtype = shape_.kv_dtype};
    for (int32_t h = 0; h < shape_.kv_heads && shape_.scaled; ++h) {
      k_scale_.push_back(0.75f + 0.5f * h);
      v_scale_.push_back(1.5f - 0.25f * h);
    }
    if (shape_.scaled) {
      kv_.k_scale = k_scale_.data();
      kv_.v_scale = v_scale_.data();
    }
    plain_.resize(size_t(kv_.num_pages) * PageBytes(kv_));
    Poison(std::span(plain_));

    // Pages in a shuffled order, so that following tokens are not neighbours in memory.
    std::vector<int32_t> free(kv_.num_pages);
    for (int32_t i = 0; i < kv_.num_pages; ++i) free[i] = i;
    std::mt19937 generator(shape_.seed);
    std::shuffle(free.begin(), free.end(), generator);

    page_tables_.resize(sequences.size());
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int64_t end = static_cast<int64_t>(live[s].size());
      for (int64_t first = 0; first < end; first += shape_.page_size) {
        const auto begin = live[s].begin() + first;
        const auto stop = live[s].begin() + std::min<int64_t>(end, first + shape_.page_size);
        const bool used = std::find(begin, stop, 1) != stop;
        page_tables_[s].push_back(used ? free.back() : kWildPage);
        if (used) free.pop_back();
      }
      page_tables_[s].push_back(kWildPage);
      Fill(s, live[s]);
    }
    memory_ = CpuOrder(kv_, plain_);
    kv_.base = memory_.data();
    int32_t row = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const auto count = static_cast<int32_t>(sequences[s].size());
      entries_.push_back({row, count, page_tables_[s]});
      row += count;
    }
  }

  // The contents of a slot depend on the sequence and the slot only, not on what else is there.
  void Fill(size_t sequence, const std::vector<char>& live) {
    const auto heads = static_cast<size_t>(shape_.kv_heads);
    for (size_t slot = 0; slot < live.size(); ++slot) {
      if (!live[slot]) continue;
      const uint32_t seed = shape_.seed * 1000003u + uint32_t(sequence) * 7919u + uint32_t(slot);
      const std::vector<std::byte> k = RandomTensor(DType::kF32, heads * shape_.head_dim, seed);
      const std::vector<std::byte> v = RandomTensor(DType::kF32, heads * shape_.ValueDim(), ~seed);
      const int64_t to =
          int64_t{page_tables_[sequence][slot / shape_.page_size]} * shape_.page_size +
          int64_t(slot % shape_.page_size);
      AppendParams append;
      append.kv = kv_;
      append.kv.base = plain_.data();
      append.k = k.data();
      append.v = v.data();
      append.input_dtype = DType::kF32;
      append.tokens = 1;
      append.slots = &to;
      ReferenceAppend(append);
    }
  }

  // An element in the order of the reference; of NVFP4, the byte that it shares.
  std::byte* Plain(bool value, size_t sequence, int64_t slot, int32_t head, int32_t d) {
    PagedKv plain = kv_;
    plain.base = plain_.data();
    const int32_t page = page_tables_[sequence][slot / shape_.page_size];
    const auto at = static_cast<int32_t>(slot % shape_.page_size);
    const size_t before = size_t(d) * static_cast<size_t>(BitsOf(shape_.kv_dtype)) / 8;
    return (value ? ValueRow : KeyRow)(plain, page, head, at) + before;
  }

  // The scale of an element's block in the order of the reference.
  std::byte* PlainScale(bool value, size_t sequence, int64_t slot, int32_t head, int32_t d) {
    PagedKv plain = kv_;
    plain.base = plain_.data();
    const int32_t page = page_tables_[sequence][slot / shape_.page_size];
    const auto at = static_cast<int32_t>(slot % shape_.page_size);
    return (value ? ValueScales : KeyScales)(plain, page, head, at) + d / kNvfp4Block;
  }

  AttentionShape shape_;
  PagedKv kv_;
  std::vector<std::byte> plain_;   // in the order of the reference
  std::vector<std::byte> memory_;  // in the order of the CPU backend
  std::vector<float> k_scale_, v_scale_;
  std::vector<std::vector<int32_t>> page_tables_;
  std::vector<AttentionEntry> entries_;
  std::vector<KeyRange> keys_;
  std::vector<std::byte> q_;
};

// Rows [length - rows, length) of a causal sequence of `length` tokens, seen through a window.
inline std::vector<KeyRange> CausalRows(int64_t length, int32_t rows, Window window = {}) {
  std::vector<KeyRange> ranges;
  for (int64_t position = length - rows; position < length; ++position) {
    ranges.push_back(position < 0 ? KeyRange{} : VisibleKeys(position, window, position + 1));
  }
  return ranges;
}

}  // namespace tributary::test
