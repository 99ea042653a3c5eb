// Queries and weights as the bf16 dot-product instruction takes them: cut into pieces that add up
// to them (bf16_pieces.h). For AVX3_DL only.
#if defined(TRIBUTARY_KERNELS_CPU_BF16_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_BF16_OPERANDS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_BF16_OPERANDS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_BF16_OPERANDS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/bf16_pieces.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/widen-inl.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

class Bf16Queries {
 public:
  using Query = uint16_t;  // bf16 bits

  static int32_t PackedElements(DType type, int32_t key_dim) { return QueryPieces(type) * key_dim; }

  // The pieces one after another.
  static HWY_INLINE void PackQuery(DType type, const std::byte* src, int32_t key_dim,
                                   Query* packed) {
    const int pieces = QueryPieces(type);
    if (pieces == 1) {
      std::memcpy(packed, src, key_dim * sizeof(Query));
      return;
    }
    HWY_ALIGN float wide[kValueColumns];
    for (int32_t block = 0; block < key_dim; block += kValueColumns) {
      const int32_t count = std::min(kValueColumns, key_dim - block);
      WidenRow(type, src + BytesOf(type, block), wide, count);
      for (int32_t i = 0; i < count; i += 16) {
        __m512 rest = _mm512_load_ps(wide + i);
        for (int piece = 0; piece < pieces; ++piece) {
          const __m512i cut = CutToBf16(rest);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + piece * key_dim + block + i),
                              _mm512_cvtepi32_epi16(_mm512_srli_epi32(cut, 16)));
          // Infinity and NaN are whole in the first piece.
          const __mmask16 finite = ~_mm512_fpclass_ps_mask(rest, kNotFinite);
          rest = _mm512_maskz_sub_ps(finite, rest, _mm512_castsi512_ps(cut));
        }
      }
    }
  }

 private:
  static constexpr int kNotFinite = 0x01 | 0x08 | 0x10 | 0x80;  // NaN, infinities

  // The upper half of every float. NaN stays NaN.
  static HWY_INLINE __m512i CutToBf16(__m512 x) {
    const __m512i bits =
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x400000));
  }
};

// The bf16 pieces of weights: kTileKeys high ones, then kTileKeys low ones if there are two pieces.
// One piece is rounded to nearest, which over many keys favours no side, so that the sum of the
// weights as they were stays the divisor. The higher of two pieces is cut, not rounded, so that the
// low one is not negative; and where a weight is not zero its low piece is not either. So an
// infinite value times a weight is infinite, not NaN.
template <int kPieces>
class Bf16Weights {
 public:
  // Those of 32 weights: the first 16, the others.
  static HWY_INLINE void Pack(__m512 w0, __m512 w1, uint16_t* pieces) {
    if constexpr (kPieces == 1) {
      _mm512_store_si512(pieces, (__m512i)_mm512_cvtne2ps_pbh(w1, w0));
    } else {
      const __m512i high_bits = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      const __m512i h0 = _mm512_and_si512(_mm512_castps_si512(w0), high_bits);
      const __m512i h1 = _mm512_and_si512(_mm512_castps_si512(w1), high_bits);
      const __m512i high = _mm512_permutex2var_epi16(h0, _mm512_load_si512(kOddHalves), h1);
      const __m512bh low = _mm512_cvtne2ps_pbh(LowPiece(w1, _mm512_castsi512_ps(h1)),
                                               LowPiece(w0, _mm512_castsi512_ps(h0)));
      _mm512_store_si512(pieces, high);
      _mm512_store_si512(pieces + kTileKeys, (__m512i)low);
    }
  }

 private:
  // Picks the upper half of every float of two vectors.
  alignas(64) static constexpr uint16_t kOddHalves[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

  static HWY_INLINE __m512 LowPiece(__m512 w, __m512 high) {
    const __m512 smallest = _mm512_set1_ps(std::numeric_limits<float>::min());
    const __m512 low = _mm512_sub_ps(w, high);
    const __mmask16 vanished = _mm512_cmp_ps_mask(low, smallest, _CMP_LT_OQ);
    return _mm512_mask_min_ps(low, vanished, w, smallest);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
