// How Bf16DotMath reads 64 elements of a row of keys or values as bf16: in place (bf16), by table
// on the way into registers (FP8), or from rows that were converted before (FP8 for many queries,
// where converting once is cheaper). For AVX3_DL only.
//
// Vectors come in the order that costs least, which a Rows type states:
//   KeyDim(i): the element of the 64 that stands at place i of the two vectors of LoadKey;
//   ValueDim(c, l): the first of the four elements in 128-bit lane l of vector c of LoadValuePair.
// FP8 rows have one order, converted before or not, so that both give the same bits.
#if defined(TRIBUTARY_KERNELS_CPU_BF16_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_BF16_ROWS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_BF16_ROWS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_BF16_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/float8_table.h"
#include "kernels/dtype.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE __m512bh Bf16(__m512i bits) { return (__m512bh)bits; }
HWY_INLINE __m512bh LoadBf16(const uint16_t* p) { return Bf16(_mm512_loadu_si512(p)); }

// Rows of bf16 in memory.
struct Bf16Loads {
  using Element = uint16_t;

  static HWY_INLINE void LoadKey(const Element* row, __m512bh (&key)[2]) {
    key[0] = LoadBf16(row);
    key[1] = LoadBf16(row + 32);
  }

  static HWY_INLINE void LoadValuePair(const Element* a, const Element* b, __m512bh (&value)[4]) {
    const __m512i a0 = _mm512_loadu_si512(a), a1 = _mm512_loadu_si512(a + 32);
    const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 32);
    value[0] = Bf16(_mm512_unpacklo_epi16(a0, b0));
    value[1] = Bf16(_mm512_unpackhi_epi16(a0, b0));
    value[2] = Bf16(_mm512_unpacklo_epi16(a1, b1));
    value[3] = Bf16(_mm512_unpackhi_epi16(a1, b1));
  }

  static HWY_INLINE bool AllFinite(const Element* row) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const __m512i x0 = _mm512_and_si512(_mm512_loadu_si512(row), exponent);
    const __m512i x1 = _mm512_and_si512(_mm512_loadu_si512(row + 32), exponent);
    return (_mm512_cmpeq_epi16_mask(x0, exponent) | _mm512_cmpeq_epi16_mask(x1, exponent)) == 0;
  }
};

// The cache's own rows of bf16.
struct Bf16Rows : Bf16Loads {
  static constexpr bool kInPlace = true;
  static constexpr int32_t KeyDim(int32_t i) { return i; }
  static constexpr int32_t ValueDim(int32_t c, int32_t l) { return c / 2 * 32 + 8 * l + c % 2 * 4; }
};

// Unpacking bytes works within 128 bits: of every 16, the first eight come first.
struct Float8Order {
  static constexpr int32_t KeyDim(int32_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
  static constexpr int32_t ValueDim(int32_t c, int32_t l) { return 16 * l + 4 * c; }
};

// Both bytes of the bf16 numbers that 64 FP8 numbers are. The low seven bits are looked up, the
// sign is copied.
HWY_INLINE void LookUpFloat8(const Float8Table& table, __m512i x, __m512i& low, __m512i& high) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  low =
      _mm512_permutex2var_epi8(_mm512_load_si512(table.low), x, _mm512_load_si512(table.low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), x,
                                                     _mm512_load_si512(table.high + 64));
  high = _mm512_ternarylogic_epi32(sign, x, magnitude, 0xca);  // sign ? x : magnitude
}

template <DType kType>
struct Float8Rows : Float8Order {
  using Element = uint8_t;
  static constexpr bool kInPlace = true;
  static constexpr const Float8Table& kTable =
      kType == DType::kFp8E4M3 ? kFloat8E4M3Table : kFloat8E5M2Table;

  static HWY_INLINE void LoadKey(const Element* row, __m512bh (&key)[2]) {
    __m512i low, high;
    LookUpFloat8(kTable, _mm512_loadu_si512(row), low, high);
    key[0] = Bf16(_mm512_unpacklo_epi8(low, high));
    key[1] = Bf16(_mm512_unpackhi_epi8(low, high));
  }

  // Interleaves the rows while they are bytes: half the work of doing it later.
  static HWY_INLINE void LoadValuePair(const Element* a, const Element* b, __m512bh (&value)[4]) {
    const __m512i xa = _mm512_loadu_si512(a), xb = _mm512_loadu_si512(b);
    __m512i low, high;
    LookUpFloat8(kTable, _mm512_unpacklo_epi8(xa, xb), low, high);
    value[0] = Bf16(_mm512_unpacklo_epi8(low, high));
    value[1] = Bf16(_mm512_unpackhi_epi8(low, high));
    LookUpFloat8(kTable, _mm512_unpackhi_epi8(xa, xb), low, high);
    value[2] = Bf16(_mm512_unpacklo_epi8(low, high));
    value[3] = Bf16(_mm512_unpackhi_epi8(low, high));
  }

  static HWY_INLINE bool AllFinite(const Element* row) {
    const __m512i special = _mm512_set1_epi8(kType == DType::kFp8E4M3 ? 0x7f : 0x7c);
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(row), special);
    return _mm512_cmpeq_epi8_mask(x, special) == 0;
  }
};

// FP8 rows converted to bf16, in the order of Float8Rows.
struct PreparedFloat8Rows : Bf16Loads, Float8Order {
  static constexpr bool kInPlace = false;

  static HWY_INLINE void Prepare(DType type, const std::byte* src, Element* dst, int32_t n) {
    const Float8Table& table = type == DType::kFp8E4M3 ? kFloat8E4M3Table : kFloat8E5M2Table;
    for (int32_t i = 0; i < n; i += 64) {
      __m512i low, high;
      LookUpFloat8(table, _mm512_loadu_si512(src + i), low, high);
      _mm512_store_si512(dst + i, _mm512_unpacklo_epi8(low, high));
      _mm512_store_si512(dst + i + 32, _mm512_unpackhi_epi8(low, high));
    }
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
