// The arithmetic of AttendChunk with the bf16 dot-product instruction (AVX512_BF16: Zen 4, Sapphire
// Rapids and later), which multiplies two bf16 pairs and adds to a float: twice the rate of float
// multiply-add, on rows half the size.
//
// Keys and values of bf16 and FP8 are exact in bf16. Queries and weights are cut into bf16 pieces
// that add up to them, as many as bf16_pieces.h says.
// Highway 1.0 has no such operation, hence intrinsics. For AVX3_DL only, see attend_chunk_bf16.cc.
#if defined(TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/bf16_pieces.h"
#include "kernels/cpu/bf16_rows-inl.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"
#include "kernels/element.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <bit>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// `Rows` says how 64 elements of a row become bf16 vectors, and in which order (bf16_rows-inl.h).
template <class Rows, int kWeightPieces>
struct Bf16DotMath {
  using Query = uint16_t;  // bf16 bits
  using Row = typename Rows::Element;
  static constexpr int kQueryBlock = 4;
  // Output lanes of a register block: four vectors of sums.
  static constexpr int32_t kBlockDims = 64;
  // Picks the upper half of every float of two vectors.
  alignas(64) static constexpr uint16_t kOddHalves[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

  static bool ReadsInPlace(DType) { return Rows::kInPlace; }
  static HWY_INLINE void PrepareRow(DType type, const std::byte* src, Row* dst, int32_t n) {
    if constexpr (!Rows::kInPlace) Rows::Prepare(type, src, dst, n);
  }

  static int32_t PackedElements(DType type, int32_t head_dim) {
    return QueryPieces(type) * head_dim;
  }

  // The pieces one after another, each in the order in which Rows reads keys.
  static HWY_INLINE void PackQuery(DType type, const std::byte* src, int32_t head_dim,
                                   Query* packed) {
    const int32_t pieces = QueryPieces(type);
    for (int32_t i = 0; i < head_dim; ++i) {
      const int32_t block = i / kBlockDims * kBlockDims;
      float rest = LoadElement(type, src, block + Rows::KeyDim(i - block));
      for (int32_t piece = 0; piece < pieces; ++piece) {
        uint32_t bits = std::bit_cast<uint32_t>(rest);
        const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        if ((bits & 0x7fffffffu) > 0x7f800000u) bits |= 0x400000u;  // NaN stays NaN when cut
        bits &= 0xffff0000u;
        packed[piece * head_dim + i] = static_cast<Query>(bits >> 16);
        rest = finite ? rest - std::bit_cast<float>(bits) : 0.0f;
      }
    }
  }

  // logits[m * kTileKeys + j] = q[m] . k[j] for four keys.
  template <int kQueries>
  static HWY_INLINE void DotFourKeys(const Query* HWY_RESTRICT q, int32_t packed_elements,
                                     const Row* const* k, int32_t head_dim, float* logits,
                                     AheadRows& ahead) {
    __m512 sum[kQueries][4];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int j = 0; j < 4; ++j) sum[m][j] = _mm512_setzero_ps();
    }
    for (int32_t piece = 0; piece < packed_elements; piece += head_dim) {
      for (int32_t i = 0; i < head_dim; i += kBlockDims) {
        ahead.Prefetch(4 * kBlockDims);
        TRIBUTARY_UNROLL for (int j = 0; j < 4; ++j) {
          __m512bh key[2];
          Rows::LoadKey(k[j] + i, key);
          TRIBUTARY_UNROLL for (int half = 0; half < 2; ++half) {
            TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
              const Query* qm = q + m * packed_elements + piece + i + 32 * half;
              sum[m][j] = _mm512_dpbf16_ps(sum[m][j], LoadBf16(qm), key[half]);
            }
          }
        }
      }
    }
    using V = hn::Vec<hn::Full512<float>>;
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      StoreSumsOfLanes(V{sum[m][0]}, V{sum[m][1]}, V{sum[m][2]}, V{sum[m][3]},
                       logits + m * kTileKeys);
    }
  }

  // The bf16 pieces of the weights: kTileKeys high ones, then kTileKeys low ones if there are two
  // pieces. One piece is rounded to nearest, which over many keys favours no side, so that the sum
  // of the weights as they were stays the divisor. The higher of two pieces is cut, not rounded, so
  // that the low one is not negative; and where a weight is not zero its low piece is not either.
  // So an infinite value times a weight is infinite, not NaN.
  static HWY_INLINE void PackWeights(const float* weights, float* packed) {
    auto* pieces = reinterpret_cast<uint16_t*>(packed);
    const __m512i high_bits = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512 smallest = _mm512_set1_ps(std::numeric_limits<float>::min());
    const auto low_piece = [&](__m512 w, __m512 high) HWY_ATTR {
      const __m512 low = _mm512_sub_ps(w, high);
      const __mmask16 vanished = _mm512_cmp_ps_mask(low, smallest, _CMP_LT_OQ);
      return _mm512_mask_min_ps(low, vanished, w, smallest);
    };
    for (int64_t j = 0; j < kTileKeys; j += 32) {
      const __m512 w0 = _mm512_load_ps(weights + j);
      const __m512 w1 = _mm512_load_ps(weights + j + 16);
      if constexpr (kWeightPieces == 1) {
        _mm512_store_si512(pieces + j, (__m512i)_mm512_cvtne2ps_pbh(w1, w0));
        continue;
      }
      const __m512i h0 = _mm512_and_si512(_mm512_castps_si512(w0), high_bits);
      const __m512i h1 = _mm512_and_si512(_mm512_castps_si512(w1), high_bits);
      const __m512i high = _mm512_permutex2var_epi16(h0, _mm512_load_si512(kOddHalves), h1);
      const __m512bh low = _mm512_cvtne2ps_pbh(low_piece(w1, _mm512_castsi512_ps(h1)),
                                               low_piece(w0, _mm512_castsi512_ps(h0)));
      _mm512_store_si512(pieces + j, high);
      _mm512_store_si512(pieces + kTileKeys + j, (__m512i)low);
    }
  }

  // sums[m] = decay[m] * sums[m] + sum over the live keys j of weights[m][j] * v[j]. Keys are taken
  // in pairs, so that one instruction adds both. The sums of a block are in the order in which Rows
  // pairs values, until StoreOutput.
  template <int kQueries>
  static HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const Row* const* v,
                                    uint64_t live, int32_t head_dim, const float* decay,
                                    float* HWY_RESTRICT sums, AheadRows& ahead) {
    const auto* pairs = reinterpret_cast<const int32_t*>(weights);
    for (int32_t i = 0; i < head_dim; i += kBlockDims) {
      __m512 sum[kQueries][4];
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
          sum[m][c] = _mm512_mul_ps(_mm512_set1_ps(decay[m]),
                                    _mm512_load_ps(sums + m * head_dim + i + c * 16));
        }
      }
      for (int64_t pair = 0; pair < kTileKeys / 2; ++pair) {
        ahead.Prefetch(2 * kBlockDims);
        if ((live >> (2 * pair) & 3) == 0) continue;
        __m512bh value[4];
        Rows::LoadValuePair(v[2 * pair] + i, v[2 * pair + 1] + i, value);
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const __m512bh high = Bf16(_mm512_set1_epi32(pairs[m * kTileKeys + pair]));
          if constexpr (kWeightPieces == 2) {
            const __m512bh low =
                Bf16(_mm512_set1_epi32(pairs[m * kTileKeys + kTileKeys / 2 + pair]));
            TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
              sum[m][c] = _mm512_dpbf16_ps(sum[m][c], low, value[c]);
            }
          }
          TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
            sum[m][c] = _mm512_dpbf16_ps(sum[m][c], high, value[c]);
          }
        }
      }
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
          _mm512_store_ps(sums + m * head_dim + i + c * 16, sum[m][c]);
        }
      }
    }
  }

  // o = scale * sums, in the order of head_dim.
  static HWY_INLINE void StoreOutput(const float* sums, float scale, int32_t head_dim, float* o) {
    const hn::Full128<float> d128;
    const auto factor = hn::Set(d128, scale);
    for (int32_t i = 0; i < head_dim; i += kBlockDims) {
      for (int32_t quarter = 0; quarter < kBlockDims / 4; ++quarter) {
        const auto sum = hn::Load(d128, sums + i + 4 * quarter);
        hn::StoreU(hn::Mul(sum, factor), d128, o + i + Rows::ValueDim(quarter / 4, quarter % 4));
      }
    }
  }

  static HWY_INLINE bool AllFinite(const Row* row, int32_t n) {
    for (int32_t i = 0; i < n; i += kBlockDims) {
      if (!Rows::AllFinite(row + i)) return false;
    }
    return true;
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
