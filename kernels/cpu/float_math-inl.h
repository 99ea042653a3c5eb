// The arithmetic of AttendChunk in float: works for every element type on every target.
//
// Keys, values and queries are rows of floats; a dot product runs over lanes of head_dim and its
// lanes are summed at the end. Compiled once a target.
#if defined(TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_FLOAT_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"
#include "kernels/cpu/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

struct FloatMath {
  using Query = float;
  using Row = float;
  static constexpr hn::ScalableTag<float> d{};
  using V = hn::Vec<decltype(d)>;
  static constexpr int kLanes = HWY_LANES(float);
  // Query vectors to a register block: 4 keys x 4 queries of sums where there are 32 registers.
  static constexpr int kQueryBlock = HWY_CAP_GE512 ? 4 : 2;
  // Vectors of outputs to a register block.
  static constexpr int kOutputVectors = 4;

  // A row the cache holds may be used where it lies.
  static bool ReadsInPlace(DType type) { return type == DType::kF32; }
  static HWY_INLINE void PrepareRow(DType type, const std::byte* src, Row* dst, int32_t n) {
    WidenRow(type, src, dst, n);
  }

  static int32_t PackedElements(DType, int32_t head_dim) { return head_dim; }
  static HWY_INLINE void PackQuery(DType type, const std::byte* src, int32_t head_dim,
                                   Query* packed) {
    WidenRow(type, src, packed, head_dim);
  }

  // logits[m * kTileKeys + j] = q[m] . k[j] for four keys.
  template <int kQueries>
  static HWY_INLINE void DotFourKeys(const Query* HWY_RESTRICT q, int32_t packed_elements,
                                     const Row* const* k, int32_t head_dim, float* logits,
                                     AheadRows& ahead) {
    V sum[kQueries][4];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int j = 0; j < 4; ++j) sum[m][j] = hn::Zero(d);
    }
    for (int32_t i = 0; i < head_dim; i += kLanes) {
      ahead.Prefetch(4 * kLanes);
      const V k0 = hn::LoadU(d, k[0] + i);
      const V k1 = hn::LoadU(d, k[1] + i);
      const V k2 = hn::LoadU(d, k[2] + i);
      const V k3 = hn::LoadU(d, k[3] + i);
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        const V qm = hn::Load(d, q + m * packed_elements + i);
        sum[m][0] = hn::MulAdd(qm, k0, sum[m][0]);
        sum[m][1] = hn::MulAdd(qm, k1, sum[m][1]);
        sum[m][2] = hn::MulAdd(qm, k2, sum[m][2]);
        sum[m][3] = hn::MulAdd(qm, k3, sum[m][3]);
      }
    }
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      StoreSumsOfLanes(sum[m][0], sum[m][1], sum[m][2], sum[m][3], logits + m * kTileKeys);
    }
  }

  // The weights of a tile in the form Accumulate wants: here, as they are.
  static HWY_INLINE void PackWeights(const float* weights, float* packed) {
    for (int64_t j = 0; j < kTileKeys; j += kLanes) {
      hn::Store(hn::Load(d, weights + j), d, packed + j);
    }
  }

  // sums[m] = decay[m] * sums[m] + sum over the live keys j of weights[m][j] * v[j].
  template <int kQueries>
  static HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const Row* const* v,
                                    uint64_t live, int32_t head_dim, const float* decay,
                                    float* HWY_RESTRICT sums, AheadRows& ahead) {
    for (int32_t i = 0; i < head_dim; i += kOutputVectors * kLanes) {
      V sum[kQueries][kOutputVectors];
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < kOutputVectors; ++c) {
          sum[m][c] =
              hn::Mul(hn::Set(d, decay[m]), hn::Load(d, sums + m * head_dim + i + c * kLanes));
        }
      }
      for (int64_t j = 0; j < kTileKeys; ++j) {
        ahead.Prefetch(kOutputVectors * kLanes);
        if ((live >> j & 1) == 0) continue;
        V value[kOutputVectors];
        TRIBUTARY_UNROLL for (int c = 0; c < kOutputVectors; ++c) {
          value[c] = hn::LoadU(d, v[j] + i + c * kLanes);
        }
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const V w = hn::Set(d, weights[m * kTileKeys + j]);
          TRIBUTARY_UNROLL for (int c = 0; c < kOutputVectors; ++c) {
            sum[m][c] = hn::MulAdd(w, value[c], sum[m][c]);
          }
        }
      }
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < kOutputVectors; ++c) {
          hn::Store(sum[m][c], d, sums + m * head_dim + i + c * kLanes);
        }
      }
    }
  }

  // o = scale * sums, in the order of head_dim.
  static HWY_INLINE void StoreOutput(const float* sums, float scale, int32_t head_dim, float* o) {
    for (int32_t i = 0; i < head_dim; i += kLanes) {
      hn::StoreU(hn::Mul(hn::Load(d, sums + i), hn::Set(d, scale)), d, o + i);
    }
  }

  static HWY_INLINE bool AllFinite(const Row* row, int32_t n) {
    auto finite = hn::IsFinite(hn::LoadU(d, row));
    for (int32_t i = kLanes; i < n; i += kLanes) {
      finite = hn::And(finite, hn::IsFinite(hn::LoadU(d, row + i)));
    }
    return hn::AllTrue(d, finite);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // include guard, toggled once a target
