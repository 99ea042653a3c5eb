// One block of queries against one chunk of keys, tile by tile: logits, online softmax, weighted
// sum of values. What a multiplication is comes as a policy (FloatMath, Bf16DotMath). Compiled once
// per target.
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

// Where a chunk's running maxima begin. Finite, so that the difference of two of them is a number.
inline constexpr float kLowest = std::numeric_limits<float>::lowest();

// A running maximum is raised when a logit is above it by this (in units of log2), and not before:
// it only serves to keep weights finite. So sums are scaled at a chunk's first tile and hardly
// again.
inline constexpr float kSlack = 8.0f;

// Applies the soft cap to logits in units of log2: cap * tanh(logit / cap), as a multiple of the
// logit, which keeps its precision under a large cap. Not inlined, as the next: rarely needed.
HWY_NOINLINE inline void CapLogits(float* row, float soft_cap) {
  const hn::ScalableTag<float> d;
  const float inverse = std::min(1.0f / soft_cap, std::numeric_limits<float>::max());
  const auto to_argument = hn::Set(d, inverse * std::numbers::ln2_v<float>);
  const auto cap = hn::Set(d, soft_cap);
  const auto log2e = hn::Set(d, std::numbers::log2e_v<float>);
  for (int64_t i = 0; i < kTileKeys; i += HWY_LANES(float)) {
    const auto logit = hn::Load(d, row + i);
    const auto x = hn::Mul(logit, to_argument);
    const auto large = hn::Mul(cap, hn::Mul(log2e, Tanh(d, x)));
    hn::Store(hn::IfThenElse(IsSmallForTanh(d, x), hn::Mul(logit, TanhRatio(d, x)), large), d,
              row + i);
  }
}

// Puts -inf where the mask has no bit.
HWY_NOINLINE inline void HideLogits(float* row, uint64_t mask) {
  for (int64_t j = 0; j < kTileKeys; ++j) {
    if ((mask >> j & 1) == 0) row[j] = -std::numeric_limits<float>::infinity();
  }
}

// Raises one query vector's running maximum to `tile_max` if that is above kSlack, and returns the
// factor by which earlier sums decay. The sums of weights do so here. Not inlined: rarely needed.
HWY_NOINLINE inline float RaiseMax(float tile_max, float& max, float* HWY_RESTRICT sums) {
  if (!(tile_max > max + kSlack)) return 1.0f;
  const hn::ScalableTag<float> d;
  const float decay = std::exp2(max - tile_max);
  max = tile_max;
  hn::Store(hn::Mul(hn::Load(d, sums), hn::Set(d, decay)), d, sums);
  return decay;
}

// Raises the running maxima of a block of query vectors as its logits of a tile demand, and fills
// in the factors by which earlier sums decay.
template <int kQueries>
HWY_INLINE void UpdateMax(const float* HWY_RESTRICT logits, float* HWY_RESTRICT max,
                          float* HWY_RESTRICT decay, float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  hn::Vec<decltype(d)> tile_max[kQueries];
  bool above = false;
  TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
    const float* row = logits + m * kTileKeys;
    tile_max[m] = hn::Load(d, row);
    TRIBUTARY_UNROLL for (int64_t i = kLanes; i < kTileKeys; i += kLanes) {
      tile_max[m] = hn::Max(tile_max[m], hn::Load(d, row + i));
    }
    above |= !hn::AllFalse(d, hn::Gt(tile_max[m], hn::Set(d, max[m] + kSlack)));
    decay[m] = 1.0f;
  }
  if (HWY_LIKELY(!above)) return;
  for (int m = 0; m < kQueries; ++m) {
    const float greatest = hn::GetLane(hn::MaxOfLanes(d, tile_max[m]));
    decay[m] = RaiseMax(greatest, max[m], sums + m * kSumLanes);
  }
}

// Turns logits of kWeighedKeys keys into weights 2^(logit - max) in place and adds them up, with
// one sum per lane.
HWY_INLINE void LogitsToWeights(float* HWY_RESTRICT row, float max, float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = HWY_LANES(float);
  auto sum = hn::Load(d, sums);
  TRIBUTARY_UNROLL for (int64_t i = 0; i < kWeighedKeys; i += kLanes) {
    const auto weight = Exp2(d, hn::Sub(hn::Load(d, row + i), hn::Set(d, max)));
    sum = hn::Add(sum, weight);
    hn::Store(weight, d, row + i);
  }
  hn::Store(sum, d, sums);
}

// The logits [vectors, kTileKeys] of a head's query vectors on their way to weights. The steps are
// taken between products with another plane (every 32 cells or so), while those wait for memory: in
// a phase of its own this takes longer than a core looks ahead, and memory rests meanwhile.
template <class Math>
class Weighing {
 public:
  // Nothing to do.
  Weighing() = default;
  Weighing(int32_t vectors, float* logits, const float* max, float* weights, float* weight_sums)
      : left_(vectors * kSteps),
        logits_(logits),
        max_(max),
        weights_(weights),
        weight_sums_(weight_sums) {}

  HWY_INLINE void Step() {
    if (left_ != 0) Weigh();
  }
  HWY_INLINE void Finish() {
    Weighing rest = *this;  // whose members are in registers
    while (rest.left_ != 0) rest.Weigh();
    left_ = 0;
  }

 private:
  static constexpr int32_t kSteps = kTileKeys / kWeighedKeys;  // of a vector

  HWY_INLINE void Weigh() {
    LogitsToWeights(logits_ + first_, *max_, weight_sums_);
    Math::PackWeights(logits_, first_, weights_);
    --left_;
    first_ += kWeighedKeys;
    if (first_ < kTileKeys) return;
    first_ = 0;
    logits_ += kTileKeys;
    weights_ += kTileKeys;
    weight_sums_ += kSumLanes;
    ++max_;
  }

  int32_t left_ = 0;   // steps
  int64_t first_ = 0;  // key of the next step
  float* logits_ = nullptr;
  const float* max_ = nullptr;
  float* weights_ = nullptr;
  float* weight_sums_ = nullptr;
};

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
        packed_elements_(Math::PackedElements(p.queries.dtype, p.key_dim)),
        planes_ahead_(PlanesAhead(PlaneBytes(p), 2 * p.kv_heads)),
        layout_(p.kv_heads * vectors_, p.key_dim, p.value_dim),
        padded_value_dim_(ValuePlanes(p.value_dim) * kValueColumns),
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
  // Of one head's keys or values of a tile, whichever are less.
  static size_t PlaneBytes(const ChunkParams& p) {
    return BytesOf(p.kv_dtype, kTileKeys * std::min(p.key_dim, p.value_dim));
  }

  HWY_INLINE void Begin() {
    const size_t head_bytes = BytesOf(p_.queries.dtype, p_.key_dim);
    Query* packed = queries_;
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      for (int32_t r = 0; r < p_.queries.rows; ++r) {
        for (int32_t h = head * heads_; h < (head + 1) * heads_; ++h, packed += packed_elements_) {
          Math::PackQuery(p_.queries.dtype,
                          p_.queries.q + r * p_.queries.row_bytes + h * head_bytes, p_.key_dim,
                          packed);
        }
      }
    }
    const int32_t all = p_.kv_heads * vectors_;
    Fill(max_, size_t(all), kLowest);
    Fill(weight_sums_, size_t(all) * kSumLanes, 0.0f);
    Fill(sums_, size_t(all) * padded_value_dim_, 0.0f);
  }

  // All heads' keys, then all heads' values: the order in which a page holds them.
  HWY_INLINE void AttendTile(const Tile& tile, const Tile& next) {
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      const CachedPlane plane = Plane(head, tile, next);
      ComputeLogits(head, tile, math_.Keys(plane));
    }
    WeighingOf(p_.kv_heads - 1, 0, vectors_).Finish();
    for (int32_t head = 0; head < p_.kv_heads; ++head) {
      const CachedPlane plane = Plane(p_.kv_heads + head, tile, next);
      const View values = math_.Values(plane);
      if (tile.uniform || math_.AllFinite(values)) {
        AccumulateVectors(head, 0, vectors_, values);
      } else {
        AccumulateRowByRow(head, tile, values);
      }
    }
  }

  // A plane of a tile: the heads' keys count first, then their values. After those of the tile the
  // next tile's are asked for.
  HWY_INLINE CachedPlane Plane(int32_t plane, const Tile& tile, const Tile& next) const {
    const int32_t planes = 2 * p_.kv_heads;
    const int32_t later = plane + planes_ahead_;
    CachedPlane cached{{Source(plane), &tile}, {}};
    if (p_.kv.pages == nullptr) return cached;
    if (later < planes) {
      cached.ahead = {Source(later), &tile};
    } else if (next.live != 0) {
      cached.ahead = {Source(later - planes), &next};
    }
    return cached;
  }
  const std::byte* Source(int32_t plane) const {
    return plane < p_.kv_heads ? p_.kv.k + plane * p_.kv.key_head_bytes
                               : p_.kv.v + (plane - p_.kv_heads) * p_.kv.value_head_bytes;
  }

  // The logits of a head in units of log2, and the weights of the head before it.
  HWY_INLINE void ComputeLogits(int32_t head, const Tile& tile, const View& keys) {
    const float scale = p_.sm_scale * (p_.k_scale == nullptr ? 1.0f : p_.k_scale[head]);
    const bool capped = p_.soft_cap > 0;
    const bool all_seen = tile.uniform && tile.live == kWholeTile;
    const float unit = scale * std::numbers::log2e_v<float>;
    ForEachBlock(0, vectors_, [&](auto block, int32_t i) HWY_ATTR {
      constexpr int kQueries = decltype(block)::value;
      const int32_t at = head * vectors_ + i;
      float* logits = logits_ + i * kTileKeys;
      Weighing<Math> beside = WeighingOf(head - 1, i, kQueries);
      math_.template Logits<kQueries>(queries_ + at * packed_elements_, keys, Pass(i), unit, logits,
                                      beside);
      for (int m = 0; m < kQueries; ++m) {
        if (capped) CapLogits(logits + m * kTileKeys, p_.soft_cap);
        if (all_seen) continue;
        HideLogits(logits + m * kTileKeys, TileMask(p_.queries.keys[(i + m) / heads_], tile.begin));
      }
      UpdateMax<kQueries>(logits, max_ + at, decay_ + at, weight_sums_ + at * kSumLanes);
    });
  }
  // Of `count` vectors of a head from `first` on; head -1: of none.
  HWY_INLINE Weighing<Math> WeighingOf(int32_t head, int32_t first, int32_t count) {
    if (head < 0) return {};
    const int32_t at = head * vectors_ + first;
    return Weighing<Math>(count, logits_ + first * kTileKeys, max_ + at, weights_ + at * kTileKeys,
                          weight_sums_ + at * kSumLanes);
  }

  // Vectors [first, last) of a head.
  HWY_INLINE void AccumulateVectors(int32_t head, int32_t first, int32_t last, const View& values) {
    ForEachBlock(first, last, [&](auto block, int32_t i) HWY_ATTR {
      const int32_t at = head * vectors_ + i;
      math_.template Accumulate<decltype(block)::value>(weights_ + at * kTileKeys, values, Pass(i),
                                                        decay_ + at, Sums(head, i),
                                                        vectors_ * kValueColumns);
    });
  }
  // Blocks of a head's vectors before the one that begins with this.
  static int32_t Pass(int32_t vector) {
    return (vector + Math::kQueryBlock - 1) / Math::kQueryBlock;
  }
  // The first kValueColumns sums of a vector of a head.
  HWY_INLINE float* Sums(int32_t head, int32_t vector) const {
    return sums_ + head * vectors_ * padded_value_dim_ + vector * kValueColumns;
  }

  // A key that one row sees and another does not has weight 0 for the other, and 0 times NaN is
  // NaN. So where values are not finite each row gets a view of its own, without those it does not
  // see. The sums are the same bits as in one pass, because adding 0 changes nothing.
  HWY_INLINE void AccumulateRowByRow(int32_t head, const Tile& tile, const View& values) {
    for (int32_t r = 0; r < p_.queries.rows; ++r) {
      const uint64_t mask = TileMask(p_.queries.keys[r], tile.begin) & tile.live;
      AccumulateVectors(head, r * heads_, (r + 1) * heads_, math_.Only(values, mask));
    }
  }

  HWY_INLINE void Finish(float* o, float* lse) {
    const hn::ScalableTag<float> d;
    for (int32_t i = 0; i < p_.kv_heads * vectors_; ++i) {
      float* out = o + i * p_.value_dim;
      const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, weight_sums_ + i * kSumLanes)));
      if (sum == 0.0f) {  // saw no key of this chunk: the identity
        Fill(out, size_t(p_.value_dim), 0.0f);
        lse[i] = -std::numeric_limits<float>::infinity();
        continue;
      }
      const float value_scale = p_.v_scale == nullptr ? 1.0f : p_.v_scale[i / vectors_];
      const auto scale = hn::Set(d, value_scale / sum);
      const float* sums = Sums(i / vectors_, i % vectors_);
      for (int32_t first = 0; first < p_.value_dim; first += kValueColumns) {
        const int32_t columns = ValuePlaneColumns(p_.value_dim, first);
        for (int32_t j = 0; j < columns; j += HWY_LANES(float)) {
          hn::StoreU(hn::Mul(hn::Load(d, sums + j), scale), d, out + first + j);
        }
        sums += vectors_ * kValueColumns;
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
  const int32_t planes_ahead_;
  const WorkspaceLayout layout_;
  const int32_t padded_value_dim_;  // of the sums: planes of V are kValueColumns apart
  const Math math_;
  Query* queries_;      // [kv_heads * vectors, packed_elements]
  float* logits_;       // [vectors, kTileKeys] of one kv head; becomes weights
  float* weights_;      // [kv_heads * vectors, kTileKeys], as Math packs them
  float* sums_;         // [kv_heads, planes of V, vectors, kValueColumns]
  float* weight_sums_;  // [kv_heads * vectors, kSumLanes]
  float* max_;          // [kv_heads * vectors], in units of log2
  float* decay_;        // [kv_heads * vectors]
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
