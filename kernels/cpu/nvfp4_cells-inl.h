// How Nvfp4DotMath reads cells of NVFP4 and block scales (nvfp4_layout.h). For AVX3_DL only.
#if defined(TRIBUTARY_KERNELS_CPU_NVFP4_CELLS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_NVFP4_CELLS_INL_H_
#undef TRIBUTARY_KERNELS_CPU_NVFP4_CELLS_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_NVFP4_CELLS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/pair_cells-inl.h"
#include "kernels/cpu/unroll.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

// e2m1 by its code as bf16; twice, because a lookup takes five bits of a word and a code has four.
alignas(64) inline constexpr uint16_t kE2M1AsBf16[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,  //
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// The numbers whose codes are in the lowest bits of the words.
HWY_INLINE __m512i LookUpE2M1(__m512i words) {
  return _mm512_permutexvar_epi16(words, _mm512_load_si512(kE2M1AsBf16));
}

// Element i of every word, as bf16. i is a constant after inlining.
HWY_INLINE __m512i Nibbles(__m512i words, int i) {
  return LookUpE2M1(i == 0 ? words : _mm512_srli_epi16(words, 4 * i));
}

// Cells of a plane of values of kGroups * 16 channels: kPairs pairs of tokens a cell.
template <int kGroups>
struct Nvfp4ValueCells {
  static constexpr int kPairs = kWordElements / kGroups;

  static HWY_INLINE void Load(const std::byte* cell, __m512i (&elements)[kPairs][kGroups]) {
    const __m512i words = _mm512_loadu_si512(cell);
    if constexpr (kGroups > 1) {
      TRIBUTARY_UNROLL for (int i = 0; i < kPairs; ++i) {
        TRIBUTARY_UNROLL for (int c = 0; c < kGroups; ++c) {
          elements[i][c] = Nibbles(words, i * kGroups + c);
        }
      }
    } else {  // half a cell has two pairs, and its bytes channels c and c + 8
      TRIBUTARY_UNROLL for (int i = 0; i < kPairs; ++i) {
        const __m512i two = i < 2 ? _mm512_shuffle_i64x2(words, words, 0x44)
                                  : _mm512_shuffle_i64x2(words, words, 0xee);
        const __m512i shift =
            _mm512_inserti64x4(_mm512_set1_epi16(i % 2 * 8), _mm256_set1_epi16(i % 2 * 8 + 4), 1);
        elements[i][0] = LookUpE2M1(_mm512_srlv_epi16(two, shift));
      }
    }
  }
};

// The block scales of one head's keys or values of a tile as floats, [dim / 16, kTileKeys]; zero
// for slots that are not in the mask. Returns whether none is NaN. Asks memory for what lies ahead.
inline bool WidenScales(const CachedPlane& plane, int32_t dim, uint64_t mask, float* scales) {
  const int32_t tokens = plane.block_tokens();
  const size_t offset = BlockScalesOffset(tokens, dim);
  const auto bytes = static_cast<size_t>(tokens) * (dim / kNvfp4Block);
  __mmask16 special = 0;
  for (int32_t block = 0; block < plane.blocks(); ++block) {
    const std::byte* from = plane.block(block) + offset;
    const std::byte* const ahead = from + plane.Ahead(block);
    for (size_t line = 0; line < bytes; line += kCellBytes) AskFor(ahead + line);
    for (int32_t group = 0; group < dim / kNvfp4Block; ++group) {
      for (int32_t x = 0; x < tokens; x += kCellColumns, from += kCellColumns) {
        const int32_t slot = block * tokens + x;
        const auto live = static_cast<__mmask16>(mask >> slot);
        const __m512i codes = _mm512_maskz_cvtepu8_epi32(
            live, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        // The exponent of the float is 120 too small. A scale has no sign.
        const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(codes, 20)),
                                           _mm512_set1_ps(0x1p120f));
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(0x7f));
        special |= nan;
        _mm512_store_ps(scales + group * kTileKeys + slot,
                        _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(value), nan,
                                                                  _mm512_set1_epi32(0x7fc00000))));
      }
    }
  }
  return special == 0;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
