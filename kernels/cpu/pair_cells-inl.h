// How Bf16DotMath reads a cell of pairs (page_layout.h) as bf16: 16 columns to a vector. For
// AVX3_DL only.
#if defined(TRIBUTARY_KERNELS_CPU_PAIR_CELLS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_PAIR_CELLS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_PAIR_CELLS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_PAIR_CELLS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/float8_table.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/dtype.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE __m512bh Bf16(__m512i bits) { return (__m512bh)bits; }

// `kLines`: see AskedLines() in tiling.h.
template <int kLines>
struct Bf16CellsAsking {
  static constexpr size_t kElementBytes = 2;
  static constexpr int kPairs = CellPairs(kElementBytes);
  // Whether registers are left for other work between the products.
  static constexpr bool kWorkBeside = true;
  // Of the four cells of a row, those that memory is asked for in one pass over a plane.
  static constexpr int kAskedLines = kLines;

  static HWY_INLINE void Load(const std::byte* cell, __m512i (&pairs)[kPairs]) {
    pairs[0] = _mm512_loadu_si512(cell);
  }
};

using Bf16Cells = Bf16CellsAsking<1>;

// FP8 by table. The magnitude's seven bits are looked up, the sign is copied. With AND and OR, not
// with one ternary operation: on Zen 4 that runs on fewer pipes, those that multiply.
template <DType kType>
struct Float8Cells {
  static constexpr size_t kElementBytes = 1;
  static constexpr int kPairs = CellPairs(kElementBytes);
  static constexpr bool kWorkBeside = false;
  static constexpr int kAskedLines = 4;  // multiplying takes longer than reading
  static constexpr const Float8Table& kTable =
      kType == DType::kFp8E4M3 ? kFloat8E4M3Table : kFloat8E5M2Table;

  static HWY_INLINE void Load(const std::byte* cell, __m512i (&pairs)[kPairs]) {
    const __m512i x = _mm512_loadu_si512(cell);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.low), x,
                                                 _mm512_load_si512(kTable.low + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.high), x,
                                                       _mm512_load_si512(kTable.high + 64));
    const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i high = _mm512_or_si512(sign, magnitude);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[1] = _mm512_unpackhi_epi8(low, high);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
