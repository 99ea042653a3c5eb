// Making planes of bf16 pairs (page_layout.h, a block of kTileKeys tokens) in scratch memory: from
// planes of the cache, and from dense rows of new tokens. For AVX3_DL only.
#if defined(TRIBUTARY_KERNELS_CPU_PAIR_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_PAIR_PLANES_INL_H_
#undef TRIBUTARY_KERNELS_CPU_PAIR_PLANES_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_PAIR_PLANES_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/pair_cells-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <algorithm>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

inline constexpr int32_t kTileColumns = static_cast<int32_t>(kTileKeys);

// Bytes of one plane of V in scratch memory.
inline constexpr size_t kScratchPlaneBytes = size_t{kTileColumns} * kValueColumns * 2;

// Calls body(source cell, number of its first pair, first column) for every cell of a tile's keys,
// and asks for what lies ahead.
template <class Cells, class Body>
HWY_INLINE void ForEachKeyCell(const CachedPlane& keys, int32_t key_dim, const Body& body) {
  const int32_t tokens = keys.block_tokens();
  for (int32_t block = 0; block < keys.blocks(); ++block) {
    const std::byte* cell = keys.block(block);
    const ptrdiff_t ahead = keys.Ahead(block);
    for (int32_t pair = 0; pair < key_dim / 2; pair += Cells::kPairs) {
      for (int32_t x = 0; x < tokens; x += kCellColumns, cell += kCellBytes) {
        AskFor(cell + ahead);
        body(cell, pair, block * tokens + x);
      }
    }
  }
}

// Calls body(source cell, plane, columns of the plane, number of its first pair, first column) for
// every cell of a tile's values, and asks for what lies ahead.
template <class Cells, class Body>
HWY_INLINE void ForEachValueCell(const CachedPlane& values, int32_t value_dim, const Body& body) {
  const int32_t tokens = values.block_tokens();
  for (int32_t block = 0; block < values.blocks(); ++block) {
    const std::byte* cell = values.block(block);
    const ptrdiff_t ahead = values.Ahead(block);
    for (int32_t plane = 0; plane < ValuePlanes(value_dim); ++plane) {
      const int32_t columns = ValuePlaneColumns(value_dim, plane * kValueColumns);
      for (int32_t pair = 0; pair < tokens / 2; pair += Cells::kPairs) {
        for (int32_t x = 0; x < columns; x += kCellColumns, cell += kCellBytes) {
          AskFor(cell + ahead);
          body(cell, plane, columns, block * tokens / 2 + pair, x);
        }
      }
    }
  }
}

template <class Cells>
void ConvertKeys(const CachedPlane& keys, int32_t key_dim, std::byte* planes) {
  ForEachKeyCell<Cells>(
      keys, key_dim, [&](const std::byte* cell, int32_t pair, int32_t column) HWY_ATTR {
        __m512i pairs[Cells::kPairs];
        Cells::Load(cell, pairs);
        TRIBUTARY_UNROLL for (int i = 0; i < Cells::kPairs; ++i) {
          _mm512_store_si512(planes + PairOffset(2, kTileColumns, pair + i, column, 0), pairs[i]);
        }
      });
}

// Sets tokens that are not in the mask to zero.
template <class Cells>
void ConvertValues(const CachedPlane& values, uint64_t mask, int32_t value_dim, std::byte* planes) {
  ForEachValueCell<Cells>(
      values, value_dim,
      [&](const std::byte* cell, int32_t plane, int32_t columns, int32_t pair, int32_t column)
          HWY_ATTR {
            __m512i pairs[Cells::kPairs];
            Cells::Load(cell, pairs);
            TRIBUTARY_UNROLL for (int i = 0; i < Cells::kPairs; ++i) {
              const uint64_t live = mask >> (2 * (pair + i));
              const uint32_t kept =
                  ((live & 1) != 0 ? 0xffffu : 0u) | ((live & 2) != 0 ? 0xffff0000u : 0u);
              _mm512_store_si512(
                  planes + plane * kScratchPlaneBytes + PairOffset(2, columns, pair + i, column, 0),
                  _mm512_and_si512(pairs[i], _mm512_set1_epi32(static_cast<int>(kept))));
            }
          });
}

template <class Cells>
bool AllPairsFinite(const CachedPlane& values, int32_t value_dim) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 special = 0;
  ForEachValueCell<Cells>(
      values, value_dim, [&](const std::byte* cell, int32_t, int32_t, int32_t, int32_t) HWY_ATTR {
        __m512i pairs[Cells::kPairs];
        Cells::Load(cell, pairs);
        TRIBUTARY_UNROLL for (int i = 0; i < Cells::kPairs; ++i) {
          special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs[i], exponent), exponent);
        }
      });
  return special == 0;
}

// Swaps rows and columns of 16 x 16 words of 32 bits.
HWY_INLINE void Transpose(__m512i (&x)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Swaps off-diagonal blocks of 8, 4, 2 and 1 words; 16 + l is lane l of the second source.
  TRIBUTARY_UNROLL for (int size = 8; size >= 1; size /= 2) {
    const __mmask16 upper = size == 8 ? 0xff00 : size == 4 ? 0xf0f0 : size == 2 ? 0xcccc : 0xaaaa;
    const __m512i first = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - size));
    const __m512i second = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(size)),
                                                 upper, lane, _mm512_set1_epi32(16));
    TRIBUTARY_UNROLL for (int i = 0; i < 16; ++i) {
      if ((i & size) != 0) continue;
      const __m512i a = x[i], b = x[i + size];
      x[i] = _mm512_permutex2var_epi32(a, first, b);
      x[i + size] = _mm512_permutex2var_epi32(a, second, b);
    }
  }
}

// Rows of bf16 from `source`, a token every row_bytes from slot 0 on. Slots that are not live are
// not read and stand as zeros.
inline void PackDenseKeys(const std::byte* source, size_t row_bytes, const Tile& tile,
                          int32_t key_dim, std::byte* planes) {
  for (int32_t token = 0; token < kTileColumns; token += kCellColumns) {
    const std::byte* rows = source + (tile.begin + token) * row_bytes;
    for (int32_t pair = 0; pair < key_dim / 2; pair += 16) {
      const int32_t count = std::min(16, key_dim / 2 - pair);
      const __mmask16 held = static_cast<__mmask16>((1u << count) - 1);
      __m512i x[16];
      TRIBUTARY_UNROLL for (int j = 0; j < 16; ++j) {
        const bool live = (tile.live >> (token + j) & 1) != 0;
        x[j] = live ? _mm512_maskz_loadu_epi32(held, rows + j * row_bytes + pair * 4)
                    : _mm512_setzero_si512();
      }
      Transpose(x);
      TRIBUTARY_UNROLL for (int i = 0; i < 16; ++i) {
        if (i >= count) break;
        _mm512_store_si512(planes + PairOffset(2, kTileColumns, pair + i, token, 0), x[i]);
      }
    }
  }
}
inline void PackDenseValues(const std::byte* source, size_t row_bytes, const Tile& tile,
                            int32_t value_dim, std::byte* planes) {
  const auto load = [&](int32_t token, int32_t d) HWY_ATTR {
    if ((tile.live >> token & 1) == 0) return _mm512_setzero_si512();
    const std::byte* row = source + (tile.begin + token) * row_bytes;
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d * sizeof(uint16_t))));
  };
  for (int32_t token = 0; token < kTileColumns; token += 2) {
    for (int32_t d = 0; d < value_dim; d += kCellColumns) {
      const int32_t plane = d / kValueColumns;
      const int32_t columns = ValuePlaneColumns(value_dim, plane * kValueColumns);
      const __m512i pairs =
          _mm512_or_si512(load(token, d), _mm512_slli_epi32(load(token + 1, d), 16));
      _mm512_store_si512(planes + plane * kScratchPlaneBytes +
                             PairOffset(2, columns, token / 2, d % kValueColumns, 0),
                         pairs);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
