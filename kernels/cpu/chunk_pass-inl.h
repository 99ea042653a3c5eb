// One block of queries against one chunk of keys, tile by tile: logits, online softmax, weighted
// sum of values. What a multiplication is comes as a policy (FloatMath, Bf16DotMath). Compiled once
// a target.
//
// Online softmax: Milakov and Gimelshein, arXiv:1805.02867.
#if defined(TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Turns a tile's raw dot products into weights exp(logit - max) in place, and updates the running
// maximum and sum. Returns the factor by which earlier sums decay.
HWY_INLINE float Reweigh(float* HWY_RESTRICT row, uint64_t mask, float logit_scale, float soft_cap,
                         float& max, float& sum) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  if (mask == 0) {
    std::fill_n(row, kTileKeys, 0.0f);
    return 1.0f;
  }
  const auto scale = hn::Set(d, logit_scale);
  for (int64_t j = 0; j < kTileKeys; j += kLanes) {
    hn::Store(hn::Mul(hn::Load(d, row + j), scale), d, row + j);
  }
  if (soft_cap > 0) {
    const auto cap = hn::Set(d, soft_cap);
    for (int64_t j = 0; j < kTileKeys; j += kLanes) {
      hn::Store(hn::Mul(cap, Tanh(d, hn::Div(hn::Load(d, row + j), cap))), d, row + j);
    }
  }
  if (mask != ~uint64_t{0}) {
    for (int64_t j = 0; j < kTileKeys; ++j) {
      if ((mask >> j & 1) == 0) row[j] = -std::numeric_limits<float>::infinity();
    }
  }
  auto tile_max = hn::Load(d, row);
  for (int64_t j = kLanes; j < kTileKeys; j += kLanes) {
    tile_max = hn::Max(tile_max, hn::Load(d, row + j));
  }
  const float new_max = std::max(max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  // While every logit is -inf there is no maximum to subtract: any finite number gives weights 0.
  const float base = new_max == -std::numeric_limits<float>::infinity() ? 0.0f : new_max;
  auto tile_sum = hn::Zero(d);
  for (int64_t j = 0; j < kTileKeys; j += kLanes) {
    const auto weight = ExpNonPositive(d, hn::Sub(hn::Load(d, row + j), hn::Set(d, base)));
    tile_sum = hn::Add(tile_sum, weight);
    hn::Store(weight, d, row + j);
  }
  // Most tiles of a long row do not raise the maximum; exp(0) is 1 without calling it.
  const float decay = max == base ? 1.0f : std::exp(max - base);
  sum = decay * sum + hn::GetLane(hn::SumOfLanes(d, tile_sum));
  max = new_max;
  return decay;
}

// The block's pass over the chunk with one kind of arithmetic.
template <class Math>
class ChunkPass {
  using Query = typename Math::Query;  // an element of a packed query
  using Row = typename Math::Row;      // an element of a row of keys or values as Math reads it

 public:
  ChunkPass(const ChunkParams& p, std::byte* memory)
      : p_(p),
        heads_(p.queries.heads),
        vectors_(p.queries.rows * p.queries.heads),
        packed_elements_(Math::PackedElements(p.queries.dtype, p.head_dim)) {
    const int32_t all = p.kv_heads * vectors_;
    const WorkspaceLayout layout(all, p.head_dim);
    queries_ = reinterpret_cast<Query*>(memory + layout.queries);
    logits_ = reinterpret_cast<float*>(memory + layout.logits);
    weights_ = reinterpret_cast<float*>(memory + layout.weights);
    sums_ = reinterpret_cast<float*>(memory + layout.sums);
    max_ = reinterpret_cast<float*>(memory + layout.state);
    sum_ = max_ + all;
    decay_ = sum_ + all;
    zeros_ = reinterpret_cast<Row*>(memory + layout.zeros);
    prepared_k_ = reinterpret_cast<Row*>(memory + layout.k);
    prepared_v_ = reinterpret_cast<Row*>(memory + layout.v);
  }

  HWY_INLINE void Run(float* o, float* lse) {
    Begin();
    TileRows tiles[2];
    int current = 0;
    LocateTile(p_, p_.chunk.lo, tiles[current]);
    for (int64_t begin = p_.chunk.lo; begin < p_.chunk.hi; begin += kTileKeys) {
      TileRows& next = tiles[1 - current];
      LocateTile(p_, begin + kTileKeys, next);
      if (tiles[current].live != 0) AttendTile(begin, tiles[current], next);
      current = 1 - current;
    }
    Finish(o, lse);
  }

 private:
  HWY_INLINE void Begin() {
    const size_t head_bytes = size_t(p_.head_dim) * SizeOf(p_.queries.dtype);
    Query* packed = queries_;
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      for (int32_t r = 0; r < p_.queries.rows; ++r) {
        for (int32_t h = head * heads_; h < (head + 1) * heads_; ++h, packed += packed_elements_) {
          Math::PackQuery(p_.queries.dtype,
                          p_.queries.q + r * p_.queries.row_bytes + h * head_bytes, p_.head_dim,
                          packed);
        }
      }
    }
    const int32_t all = p_.kv_heads * vectors_;
    std::fill_n(max_, all, -std::numeric_limits<float>::infinity());
    std::fill_n(sum_, all, 0.0f);
    std::fill_n(sums_, size_t(all) * p_.head_dim, 0.0f);
    std::fill_n(zeros_, p_.head_dim, Row{0});
  }

  // All heads' keys, then all heads' values: a page holds its keys together and its values
  // together, so memory is read in long runs, which the hardware prefetches.
  HWY_INLINE void AttendTile(int64_t begin, const TileRows& tile, const TileRows& next) {
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      const Row* k[kTileKeys];
      Prepare(tile, p_.kv.k + head * p_.kv.head_bytes, prepared_k_, k);
      const bool last = head + 1 == p_.kv_heads;
      ComputeLogits(head, tile.live, k,
                    last ? RowsAhead(p_.kv.v, 0, tile) : RowsAhead(p_.kv.k, head + 1, tile));
      Weigh(head, begin, tile.live);
    }
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      const Row* v[kTileKeys];
      Prepare(tile, p_.kv.v + head * p_.kv.head_bytes, prepared_v_, v);
      const bool last = head + 1 == p_.kv_heads;
      AheadRows ahead = last ? RowsAhead(p_.kv.k, 0, next) : RowsAhead(p_.kv.v, head + 1, tile);
      if (tile.uniform || AllFinite(tile.live, v)) {
        AccumulateVectors(head * vectors_, (head + 1) * vectors_, v, tile.live, ahead);
      } else {
        AccumulateRowByRow(head, begin, tile.live, v, ahead);
      }
    }
  }

  AheadRows RowsAhead(const std::byte* rows, int32_t head, const TileRows& tile) const {
    return {rows + head * p_.kv.head_bytes, tile, p_.head_dim, SizeOf(p_.kv_dtype)};
  }

  HWY_INLINE void Weigh(int32_t head, int64_t begin, uint64_t live) {
    const float logit_scale = p_.sm_scale * (p_.k_scale == nullptr ? 1.0f : p_.k_scale[head]);
    for (int32_t r = 0; r < p_.queries.rows; ++r) {
      const uint64_t mask = TileMask(p_.queries.keys[r], begin) & live;
      const int32_t first = head * vectors_ + r * heads_;
      for (int32_t i = first; i < first + heads_; ++i) {
        decay_[i] =
            Reweigh(logits_ + i * kTileKeys, mask, logit_scale, p_.soft_cap, max_[i], sum_[i]);
        Math::PackWeights(logits_ + i * kTileKeys, weights_ + i * kTileKeys);
      }
    }
  }

  // Rows as Math reads them: the cache's own where it can be read in place, else converted. Slots
  // that are not live stand as zeros.
  HWY_INLINE void Prepare(const TileRows& tile, const std::byte* source, Row* prepared,
                          const Row** rows) {
    const bool in_place = Math::ReadsInPlace(p_.kv_dtype);
    for (int64_t j = 0; j < kTileKeys; ++j) {
      if ((tile.live >> j & 1) == 0) {
        rows[j] = zeros_;
      } else if (in_place) {
        rows[j] = reinterpret_cast<const Row*>(source + tile.offset[j]);
      } else {
        Math::PrepareRow(p_.kv_dtype, source + tile.offset[j], prepared + j * p_.head_dim,
                         p_.head_dim);
        rows[j] = prepared + j * p_.head_dim;
      }
    }
  }

  HWY_INLINE void ComputeLogits(int32_t head, uint64_t live, const Row* const* k, AheadRows ahead) {
    for (int64_t j = 0; j < kTileKeys; j += 4) {
      if ((live >> j & 15) == 0) continue;
      ForEachBlock(head * vectors_, (head + 1) * vectors_, [&](auto block, int32_t i) HWY_ATTR {
        Math::template DotFourKeys<decltype(block)::value>(queries_ + i * packed_elements_,
                                                           packed_elements_, k + j, p_.head_dim,
                                                           logits_ + i * kTileKeys + j, ahead);
      });
    }
  }

  HWY_INLINE bool AllFinite(uint64_t live, const Row* const* rows) const {
    for (int64_t j = 0; j < kTileKeys; ++j) {
      if ((live >> j & 1) != 0 && !Math::AllFinite(rows[j], p_.head_dim)) return false;
    }
    return true;
  }

  HWY_INLINE void AccumulateVectors(int32_t first, int32_t last, const Row* const* v, uint64_t live,
                                    AheadRows& ahead) {
    ForEachBlock(first, last, [&](auto block, int32_t i) HWY_ATTR {
      Math::template Accumulate<decltype(block)::value>(weights_ + i * kTileKeys, v, live,
                                                        p_.head_dim, decay_ + i,
                                                        sums_ + i * p_.head_dim, ahead);
    });
  }

  // A key that one row sees and another does not has weight 0 for the other, and 0 times NaN is
  // NaN. So where values are not finite each row gets rows of its own, zero where it does not see.
  // The sums are the same bits as in one pass, because adding 0 changes nothing.
  HWY_INLINE void AccumulateRowByRow(int32_t head, int64_t begin, uint64_t live,
                                     const Row* const* v, AheadRows& ahead) {
    for (int32_t r = 0; r < p_.queries.rows; ++r) {
      const uint64_t mask = TileMask(p_.queries.keys[r], begin) & live;
      const Row* seen[kTileKeys];
      for (int64_t j = 0; j < kTileKeys; ++j) seen[j] = (mask >> j & 1) != 0 ? v[j] : zeros_;
      const int32_t first = head * vectors_ + r * heads_;
      AccumulateVectors(first, first + heads_, seen, mask, ahead);
    }
  }

  HWY_INLINE void Finish(float* o, float* lse) {
    for (int32_t i = 0; i < p_.kv_heads * vectors_; ++i) {
      float* out = o + i * p_.head_dim;
      if (sum_[i] == 0.0f) {  // saw no key of this chunk: the identity
        std::fill_n(out, p_.head_dim, 0.0f);
        lse[i] = -std::numeric_limits<float>::infinity();
        continue;
      }
      const float value_scale = p_.v_scale == nullptr ? 1.0f : p_.v_scale[i / vectors_];
      Math::StoreOutput(sums_ + i * p_.head_dim, value_scale / sum_[i], p_.head_dim, out);
      lse[i] = max_[i] + std::log(sum_[i]);
    }
  }

  // Calls body(block size as a constant, first vector) over [first, last) in blocks of 4, 2 and 1.
  template <class Body>
  HWY_INLINE void ForEachBlock(int32_t first, int32_t last, const Body& body) {
    int32_t i = first;
    if constexpr (Math::kQueryBlock >= 4) {
      for (; i + 4 <= last; i += 4) body(std::integral_constant<int, 4>(), i);
    }
    for (; i + 2 <= last; i += 2) body(std::integral_constant<int, 2>(), i);
    for (; i < last; ++i) body(std::integral_constant<int, 1>(), i);
  }

  const ChunkParams& p_;
  const int32_t heads_;
  const int32_t vectors_;  // of a kv head
  const int32_t packed_elements_;
  Query* queries_;   // [kv_heads * vectors, packed_elements]
  float* logits_;    // [kv_heads * vectors, kTileKeys]; becomes weights
  float* weights_;   // [kv_heads * vectors, kTileKeys], as Math packs them
  float* sums_;      // [kv_heads * vectors, head_dim], as Math orders them
  float* max_;       // [kv_heads * vectors]
  float* sum_;       // [kv_heads * vectors]
  float* decay_;     // [kv_heads * vectors]
  Row* zeros_;       // [head_dim]
  Row* prepared_k_;  // [kTileKeys, head_dim]
  Row* prepared_v_;  // [kTileKeys, head_dim]
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
