// The arithmetic of AttendChunk in float: works for every element type on every target.
//
// Keys are unpacked to one row per channel, values to one row per token, so that both products are
// the same loop: a number in every lane times a row, added to the lanes' sums. A cache in f32 has
// them so already, and is read where it lies. Compiled once per target.
#if defined(TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/float_rows-inl.h"
#include "kernels/cpu/nvfp4_rows-inl.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

class FloatMath {
 public:
  using Query = float;
  // Query vectors to a register block: 4 times 4 vectors of sums where there are 32 registers.
  static constexpr int kQueryBlock = HWY_CAP_GE512 ? 4 : 2;

  // Rows of a tile, in scratch memory or, block by block, in the cache.
  struct View {
    const float* block[Tile::kMaxBlocks] = {};
    ptrdiff_t ahead[Tile::kMaxBlocks] = {};  // bytes to what is asked of memory; 0: nothing
    int block_shift = Tile::kTileShift;      // log2 of the tokens of a block
    size_t stride = 0;                       // floats from one row to the next
    uint64_t live = 0;  // values: the tokens that count; others may hold anything

    // Keys: where tokens from `slot` on are in the first row.
    const float* columns(int64_t slot) const {
      return block[slot >> block_shift] + (slot & InBlock());
    }
    // Values: the row of a token.
    const float* row(int64_t slot) const {
      return block[slot >> block_shift] + size_t(slot & InBlock()) * stride;
    }
    ptrdiff_t ahead_of(int64_t slot) const { return ahead[slot >> block_shift]; }

   private:
    int64_t InBlock() const { return (int64_t{1} << block_shift) - 1; }
  };

  FloatMath(const ChunkParams& p, std::byte* memory, const WorkspaceLayout& layout)
      : p_(p),
        row_(reinterpret_cast<float*>(memory + layout.row)),
        k_(reinterpret_cast<float*>(memory + layout.k)),
        v_(reinterpret_cast<float*>(memory + layout.v)) {}

  static int32_t PackedElements(DType, int32_t key_dim) { return key_dim; }
  static HWY_INLINE void PackQuery(DType type, const std::byte* src, int32_t key_dim,
                                   Query* packed) {
    WidenRow(type, src, packed, key_dim);
  }
  // Weights are used as they are.
  static HWY_INLINE void PackWeights(const float* weights, int64_t first, float* packed) {
    std::copy_n(weights + first, kWeighedKeys, packed + first);
  }

  // The columns of slots that are not live may hold anything, because their logits are masked.
  View Keys(const CachedPlane& keys) const {
    if (p_.kv.pages == nullptr) {
      TransposeDenseKeys(p_.kv_dtype, keys.head, p_.kv.key_row_bytes, *keys.tile, p_.key_dim, row_,
                         k_);
    } else if (p_.kv_dtype == DType::kF32) {
      return InCache(keys, size_t(keys.block_tokens()));
    } else if (p_.kv_dtype == DType::kNvfp4) {
      UnpackNvfp4Keys(keys, p_.key_dim, k_);
    } else {
      UnpackKeys(p_.kv_dtype, keys, p_.key_dim, k_);
    }
    return Scratch(k_, size_t(kTileKeys), kWholeTile);
  }

  View Values(const CachedPlane& values) const {
    const Tile& tile = *values.tile;
    if (p_.kv.pages == nullptr && p_.kv_dtype == DType::kF32) {
      const std::byte* first = values.head + tile.begin * p_.kv.value_row_bytes;
      return Scratch(reinterpret_cast<const float*>(first), p_.kv.value_row_bytes / sizeof(float),
                     tile.live);
    }
    if (p_.kv.pages == nullptr) {
      WidenDenseValues(p_.kv_dtype, values.head, p_.kv.value_row_bytes, tile, p_.value_dim, v_);
    } else if (p_.kv_dtype == DType::kF32) {
      return InCache(values, size_t(p_.value_dim));
    } else if (p_.kv_dtype == DType::kNvfp4) {
      UnpackNvfp4Values(values, p_.value_dim, v_);
    } else {
      UnpackValues(p_.kv_dtype, values, p_.value_dim, v_);
    }
    return Scratch(v_, size_t(p_.value_dim), tile.live);
  }

  bool AllFinite(const View& values) const {
    for (int64_t j = 0; j < kTileKeys; ++j) {
      if ((values.live >> j & 1) != 0 && !RowFinite(values.row(j))) return false;
    }
    return true;
  }

  View Only(View values, uint64_t mask) const {
    values.live &= mask;
    return values;
  }

  // logits[m * kTileKeys + j] = scale * (q[m] . k[j]). Does all of `beside` first: there is no time
  // in which loads are waited for.
  template <int kQueries, class Beside>
  HWY_INLINE void Logits(const Query* HWY_RESTRICT q, const View& keys, int32_t /*pass*/,
                         float scale, float* HWY_RESTRICT logits, Beside& beside) const {
    beside.Finish();
    for (int64_t j = 0; j < kTileKeys; j += kBlock) {
      V sum[kQueries][kVectors];
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < kVectors; ++c) sum[m][c] = hn::Zero(d);
      }
      const float* column[kVectors];
      TRIBUTARY_UNROLL for (int c = 0; c < kVectors; ++c) column[c] = keys.columns(j + c * kLanes);
      const ptrdiff_t ahead = keys.ahead_of(j);
      size_t at = 0;
      for (int32_t i = 0; i < p_.key_dim; ++i, at += keys.stride) {
        if (ahead != 0) AskForRow<kVectors>(column[0] + at, ahead);
        AddRow<kQueries>(q + i, p_.key_dim, column, at, sum);
      }
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < kVectors; ++c) {
          hn::Store(hn::Mul(sum[m][c], hn::Set(d, scale)), d,
                    logits + m * kTileKeys + j + c * kLanes);
        }
      }
    }
  }

  // sums[m] = decay[m] * sums[m] + sum over the live keys j of weights[m][j] * v[j]. Of every
  // sums[m] there are kValueColumns channels, one m after another, and `stride` numbers on the
  // next.
  template <int kQueries>
  HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const View& values,
                             int32_t /*pass*/, const float* decay, float* HWY_RESTRICT sums,
                             int32_t stride) const {
    static_assert(kValueColumns % kBlock == 0);
    const auto accumulate = [&](auto vectors, int32_t first) HWY_ATTR {
      AccumulateBlock<kQueries, decltype(vectors)::value>(
          weights, values, decay, first,
          sums + first / kValueColumns * stride + first % kValueColumns);
    };
    int32_t i = 0;
    for (; i + kBlock <= p_.value_dim; i += kBlock) {
      accumulate(std::integral_constant<int, kVectors>(), i);
    }
    if (i == p_.value_dim) return;
    // What is left of 80 or 96 channels is 16 or 32 of them.
    for (; i + 2 * kLanes <= p_.value_dim; i += 2 * kLanes) {
      accumulate(std::integral_constant<int, 2>(), i);
    }
    for (; i < p_.value_dim; i += kLanes) accumulate(std::integral_constant<int, 1>(), i);
  }

 private:
  static constexpr hn::ScalableTag<float> d{};
  using V = hn::Vec<decltype(d)>;
  static constexpr int kLanes = HWY_LANES(float);
  static constexpr int kVectors = 4;  // of a row, to a register block
  static constexpr int kBlock = kVectors * kLanes;

  static View Scratch(const float* rows, size_t stride, uint64_t live) {
    View view;
    view.block[0] = rows;
    view.stride = stride;
    view.live = live;
    return view;
  }
  // A plane of f32 where it lies.
  static View InCache(const CachedPlane& plane, size_t stride) {
    View view;
    for (int32_t i = 0; i < plane.blocks(); ++i) {
      view.block[i] = reinterpret_cast<const float*>(plane.block(i));
      view.ahead[i] = plane.Ahead(i);
    }
    view.block_shift = plane.tile->block_shift;
    view.stride = stride;
    view.live = plane.tile->live;
    return view;
  }

  // Accumulate for kCount vectors of channels from `first` on, whose sums are at `block`.
  template <int kQueries, int kCount>
  static HWY_INLINE void AccumulateBlock(const float* HWY_RESTRICT weights, const View& values,
                                         const float* decay, int32_t first,
                                         float* HWY_RESTRICT block) {
    V sum[kQueries][kCount];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kCount; ++c) {
        sum[m][c] =
            hn::Mul(hn::Set(d, decay[m]), hn::Load(d, block + m * kValueColumns + c * kLanes));
      }
    }
    for (int64_t j = 0; j < kTileKeys; ++j) {
      if ((values.live >> j & 1) == 0) continue;
      const float* const row = values.row(j) + first;
      const float* column[kCount];
      TRIBUTARY_UNROLL for (int c = 0; c < kCount; ++c) column[c] = row + c * kLanes;
      if (const ptrdiff_t ahead = values.ahead_of(j); ahead != 0) AskForRow<kCount>(row, ahead);
      AddRow<kQueries>(weights + j, kTileKeys, column, 0, sum);
    }
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kCount; ++c) {
        hn::Store(sum[m][c], d, block + m * kValueColumns + c * kLanes);
      }
    }
  }

  // Asks memory for the lines of kCount vectors, `ahead` bytes on.
  template <int kCount>
  static HWY_INLINE void AskForRow(const float* row, ptrdiff_t ahead) {
    const std::byte* const first = reinterpret_cast<const std::byte*>(row) + ahead;
    TRIBUTARY_UNROLL for (size_t byte = 0; byte < kCount * kLanes * sizeof(float); byte += 64) {
      AskFor(first + byte);
    }
  }

  // sum[m] += factors[m * stride] * the row whose vector c begins at column[c] + at.
  template <int kQueries, int kCount>
  static HWY_INLINE void AddRow(const float* HWY_RESTRICT factors, int64_t stride,
                                const float* const (&column)[kCount], size_t at,
                                V (&sum)[kQueries][kCount]) {
    V x[kCount];
    TRIBUTARY_UNROLL for (int c = 0; c < kCount; ++c) x[c] = hn::LoadU(d, column[c] + at);
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      const V factor = hn::Set(d, factors[m * stride]);
      TRIBUTARY_UNROLL for (int c = 0; c < kCount; ++c) {
        sum[m][c] = hn::MulAdd(factor, x[c], sum[m][c]);
      }
    }
  }

  HWY_INLINE bool RowFinite(const float* row) const {
    auto finite = hn::IsFinite(hn::LoadU(d, row));
    for (int32_t i = kLanes; i < p_.value_dim; i += kLanes) {
      finite = hn::And(finite, hn::IsFinite(hn::LoadU(d, row + i)));
    }
    return hn::AllTrue(d, finite);
  }

  const ChunkParams& p_;
  float* const row_;  // [the wider of key_dim and value_dim]
  float* const k_;    // [key_dim, kTileKeys]
  float* const v_;    // [kTileKeys, value_dim]
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
