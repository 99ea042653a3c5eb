// One block of queries against one chunk of keys, tile by tile: logits, online softmax, weighted
// sum of values. What a multiplication is comes as a policy (FloatMath, Bf16DotMath). Compiled once
// a target.
//
// Online softmax: Milakov and Gimelshein, arXiv:1805.02867. Logits are kept in units of log2, so
// that a weight is a power of two.
#if defined(TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_CHUNK_PASS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// What turns a dot product into a logit.
struct LogitScale {
  float scale = 1.0f;
  float soft_cap = 0.0f;
};

// Puts -inf where the mask has no bit. Not inlined: rarely needed.
HWY_NOINLINE inline void HideLogits(float* row, uint64_t mask) {
  for (int64_t j = 0; j < kTileKeys; ++j) {
    if ((mask >> j & 1) == 0) row[j] = -std::numeric_limits<float>::infinity();
  }
}

// Turns a tile's raw dot products into weights 2^(logit - max) in place, and updates the running
// maximum and the sums of weights, a sum a lane. Returns the factor by which earlier sums decay.
HWY_INLINE float Reweigh(float* HWY_RESTRICT row, uint64_t mask, LogitScale logit, float& max,
                         float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  constexpr int64_t kVectors = kTileKeys / kLanes;
  constexpr float kLog2e = std::numbers::log2e_v<float>;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  if (mask == 0) {
    std::fill_n(row, kTileKeys, 0.0f);
    return 1.0f;
  }
  // Logits in units of log2.
  hn::Vec<decltype(d)> x[kVectors];
  if (logit.soft_cap > 0) {
    const auto scale = hn::Set(d, logit.scale / logit.soft_cap);
    const auto cap = hn::Set(d, logit.soft_cap * kLog2e);
    for (int64_t i = 0; i < kVectors; ++i) {
      x[i] = hn::Mul(cap, Tanh(d, hn::Mul(hn::Load(d, row + i * kLanes), scale)));
    }
  } else {
    const auto scale = hn::Set(d, logit.scale * kLog2e);
    TRIBUTARY_UNROLL for (int64_t i = 0; i < kVectors; ++i) {
      x[i] = hn::Mul(hn::Load(d, row + i * kLanes), scale);
    }
  }
  if (mask != kWholeTile) {
    for (int64_t i = 0; i < kVectors; ++i) hn::Store(x[i], d, row + i * kLanes);
    HideLogits(row, mask);
    for (int64_t i = 0; i < kVectors; ++i) x[i] = hn::Load(d, row + i * kLanes);
  }
  auto tile_max = x[0];
  TRIBUTARY_UNROLL for (int64_t i = 1; i < kVectors; ++i) tile_max = hn::Max(tile_max, x[i]);
  // Most tiles of a long row do not raise the maximum, and need not know their own.
  float new_max = max;
  if (!hn::AllFalse(d, hn::Gt(tile_max, hn::Set(d, max)))) {
    new_max = std::max(max, hn::GetLane(hn::MaxOfLanes(d, tile_max)));
  }
  // While every logit is -inf there is no maximum to subtract: any finite number gives weights 0.
  const float base = new_max == kNone ? 0.0f : new_max;
  const float decay = max == base ? 1.0f : std::exp2(max - base);  // 1 without calling it
  auto sum = hn::Mul(hn::Load(d, sums), hn::Set(d, decay));
  TRIBUTARY_UNROLL for (int64_t i = 0; i < kVectors; ++i) {
    const auto weight = Exp2NonPositive(d, hn::Sub(x[i], hn::Set(d, base)));
    sum = hn::Add(sum, weight);
    hn::Store(weight, d, row + i * kLanes);
  }
  hn::Store(sum, d, sums);
  max = new_max;
  return decay;
}

// The block's pass over the chunk with one kind of arithmetic.
template <class Math>
class ChunkPass {
  using Query = typename Math::Query;  // an element of a packed query
  using View = typename Math::View;    // one head's keys or values of a tile as Math reads them

 public:
  ChunkPass(const ChunkParams& p, std::byte* memory)
      : p_(p),
        heads_(p.queries.heads),
        vectors_(p.queries.rows * p.queries.heads),
        packed_elements_(Math::PackedElements(p.queries.dtype, p.head_dim)),
        ahead_(AheadPatternOf(vectors_, SizeOf(p.kv_dtype))),
        ahead_planes_(static_cast<int32_t>(ahead_.distance / PlaneBytes(p))),
        ahead_skip_(ahead_.distance % PlaneBytes(p)),
        layout_(p.kv_heads * vectors_, p.head_dim),
        math_(p, memory, layout_) {
    queries_ = reinterpret_cast<Query*>(memory + layout_.queries);
    logits_ = reinterpret_cast<float*>(memory + layout_.logits);
    weights_ = reinterpret_cast<float*>(memory + layout_.weights);
    sums_ = reinterpret_cast<float*>(memory + layout_.sums);
    weight_sums_ = reinterpret_cast<float*>(memory + layout_.weight_sums);
    max_ = reinterpret_cast<float*>(memory + layout_.state);
    decay_ = max_ + p_.kv_heads * vectors_;
  }

  HWY_INLINE void Run(float* o, float* lse) {
    Begin();
    Tile tiles[2];
    int current = 0;
    LocateTile(p_, p_.chunk.lo, tiles[current]);
    for (int64_t begin = p_.chunk.lo; begin < p_.chunk.hi; begin += kTileKeys) {
      Tile& next = tiles[1 - current];
      LocateTile(p_, begin + kTileKeys, next);
      if (tiles[current].live != 0) AttendTile(tiles[current], next);
      current = 1 - current;
    }
    Finish(o, lse);
  }

 private:
  // Of one head's keys or values of a tile.
  static size_t PlaneBytes(const ChunkParams& p) {
    return size_t(kTileKeys) * p.head_dim * SizeOf(p.kv_dtype);
  }

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
    std::fill_n(weight_sums_, size_t(all) * kSumLanes, 0.0f);
    std::fill_n(sums_, size_t(all) * p_.head_dim, 0.0f);
  }

  // All heads' keys, then all heads' values: the order in which a page holds them.
  HWY_INLINE void AttendTile(const Tile& tile, const Tile& next) {
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      ComputeLogits(head, math_.Keys(tile, head), Ahead(head, tile, next));
      Weigh(head, tile);
    }
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      ReadAhead ahead = Ahead(p_.kv_heads + head, tile, next);
      const View values = math_.Values(tile, head);
      if (tile.uniform || math_.AllFinite(values)) {
        AccumulateVectors(head * vectors_, (head + 1) * vectors_, values, ahead);
      } else {
        AccumulateRowByRow(head, tile, values, ahead);
      }
    }
  }

  // What to ask of memory during plane `plane` of a tile: the heads' keys count first, then their
  // values, then the next tile's.
  ReadAhead Ahead(int32_t plane, const Tile& tile, const Tile& next) const {
    if (p_.kv.pages == nullptr) return {};
    const int32_t planes = 2 * p_.kv_heads;  // of a tile
    const int32_t first = plane + ahead_planes_;
    const auto tile_of = [&](int32_t index) -> const Tile& { return index < planes ? tile : next; };
    const auto source = [&](int32_t index) {
      const int32_t in_tile = index < planes ? index : index - planes;
      return in_tile < p_.kv_heads ? p_.kv.k + in_tile * p_.kv.head_bytes
                                   : p_.kv.v + (in_tile - p_.kv_heads) * p_.kv.head_bytes;
    };
    const auto exists = [&](int32_t index) {
      return index < 2 * planes && tile_of(index).live != 0;
    };
    // Mostly the heads' planes follow one another in one block.
    const bool within_keys = first + 1 < p_.kv_heads;
    const bool within_values = first >= p_.kv_heads && first + 1 < planes;
    if (tile.blocks() == 1 && (within_keys || within_values)) {
      return ReadAhead(source(first) + tile.block[0] + ahead_skip_, p_.kv.head_bytes, ahead_);
    }
    if (!exists(first)) return {};
    ReadAhead ahead(source(first), tile_of(first), p_.kv.head_bytes, ahead_skip_, ahead_);
    if (exists(first + 1)) ahead.Then(source(first + 1), tile_of(first + 1), ahead_skip_);
    return ahead;
  }

  HWY_INLINE void ComputeLogits(int32_t head, const View& keys, ReadAhead ahead) {
    ForEachBlock(head * vectors_, (head + 1) * vectors_, [&](auto block, int32_t i) HWY_ATTR {
      math_.template Logits<decltype(block)::value>(queries_ + i * packed_elements_, keys,
                                                    logits_ + (i - head * vectors_) * kTileKeys,
                                                    ahead);
    });
  }

  HWY_INLINE void Weigh(int32_t head, const Tile& tile) {
    const LogitScale logit{p_.sm_scale * (p_.k_scale == nullptr ? 1.0f : p_.k_scale[head]),
                           p_.soft_cap};
    for (int32_t r = 0; r < p_.queries.rows; ++r) {
      const uint64_t mask = TileMask(p_.queries.keys[r], tile.begin) & tile.live;
      const int32_t first = head * vectors_ + r * heads_;
      for (int32_t i = first; i < first + heads_; ++i) {
        float* row = logits_ + (i - head * vectors_) * kTileKeys;
        decay_[i] = Reweigh(row, mask, logit, max_[i], weight_sums_ + i * kSumLanes);
        Math::PackWeights(row, weights_ + i * kTileKeys);
      }
    }
  }

  HWY_INLINE void AccumulateVectors(int32_t first, int32_t last, const View& values,
                                    ReadAhead& ahead) {
    ForEachBlock(first, last, [&](auto block, int32_t i) HWY_ATTR {
      math_.template Accumulate<decltype(block)::value>(weights_ + i * kTileKeys, values,
                                                        decay_ + i, sums_ + i * p_.head_dim, ahead);
    });
  }

  // A key that one row sees and another does not has weight 0 for the other, and 0 times NaN is
  // NaN. So where values are not finite each row gets a view of its own, without those it does not
  // see. The sums are the same bits as in one pass, because adding 0 changes nothing.
  HWY_INLINE void AccumulateRowByRow(int32_t head, const Tile& tile, const View& values,
                                     ReadAhead& ahead) {
    for (int32_t r = 0; r < p_.queries.rows; ++r) {
      const uint64_t mask = TileMask(p_.queries.keys[r], tile.begin) & tile.live;
      const int32_t first = head * vectors_ + r * heads_;
      AccumulateVectors(first, first + heads_, math_.Only(values, mask), ahead);
    }
  }

  HWY_INLINE void Finish(float* o, float* lse) {
    const hn::ScalableTag<float> d;
    for (int32_t i = 0; i < p_.kv_heads * vectors_; ++i) {
      float* out = o + i * p_.head_dim;
      const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, weight_sums_ + i * kSumLanes)));
      if (sum == 0.0f) {  // saw no key of this chunk: the identity
        std::fill_n(out, p_.head_dim, 0.0f);
        lse[i] = -std::numeric_limits<float>::infinity();
        continue;
      }
      const float value_scale = p_.v_scale == nullptr ? 1.0f : p_.v_scale[i / vectors_];
      const auto scale = hn::Set(d, value_scale / sum);
      for (int32_t j = 0; j < p_.head_dim; j += HWY_LANES(float)) {
        hn::StoreU(hn::Mul(hn::Load(d, sums_ + i * p_.head_dim + j), scale), d, out + j);
      }
      lse[i] = max_[i] * std::numbers::ln2_v<float> + std::log(sum);
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
  const AheadPattern ahead_;
  const int32_t ahead_planes_;  // the distance in whole planes
  const size_t ahead_skip_;     // and the rest of it in bytes
  const WorkspaceLayout layout_;
  const Math math_;
  Query* queries_;      // [kv_heads * vectors, packed_elements]
  float* logits_;       // [vectors, kTileKeys] of one kv head; becomes weights
  float* weights_;      // [kv_heads * vectors, kTileKeys], as Math packs them
  float* sums_;         // [kv_heads * vectors, head_dim]
  float* weight_sums_;  // [kv_heads * vectors, kSumLanes]
  float* max_;          // [kv_heads * vectors], in units of log2
  float* decay_;        // [kv_heads * vectors]
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
