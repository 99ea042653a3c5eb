// The arithmetic of AttendChunk over caches in NVFP4 with the bf16 dot-product instruction.
//
// An e2m1 element is a bf16 number, so the products are those of Bf16DotMath over elements without
// their block scales. These are applied where 16 products share one: a logit is the sum over blocks
// of 16 channels of scale * dot product, and a value's scale goes to the token's weight, of which
// there is then one for every 16 channels. Elements are never NaN; block scales may be.
//
// For AVX3_DL only, see attend_chunk_bf16.cc.
#if defined(TRIBUTARY_KERNELS_CPU_NVFP4_DOT_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_NVFP4_DOT_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_NVFP4_DOT_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_NVFP4_DOT_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/bf16_operands-inl.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/nvfp4_cells-inl.h"
#include "kernels/cpu/nvfp4_layout.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

template <int kWeightPieces>
class Nvfp4DotMath : public Bf16Queries {
 public:
  static constexpr int kQueryBlock = 4;

  // One head's keys or values of a tile, and their block scales.
  struct View {
    const CachedPlane* plane = nullptr;
    const float* scales = nullptr;  // [dim / 16, kTileKeys]; zero where a token does not count
    bool finite = true;             // no scale is NaN
  };

  Nvfp4DotMath(const ChunkParams& p, std::byte* memory, const WorkspaceLayout& layout)
      : p_(p),
        k_(reinterpret_cast<float*>(memory + layout.k)),
        v_(reinterpret_cast<float*>(memory + layout.v)) {}

  // Weights stay as they are until they are scaled.
  static HWY_INLINE void PackWeights(const float* weights, int64_t first, float* packed) {
    std::copy_n(weights + first, kWeighedKeys, packed + first);
  }

  // Logits of slots that are not live may be anything, because they are masked.
  View Keys(const CachedPlane& keys) const {
    return {&keys, k_, WidenScales(keys, p_.key_dim, kWholeTile, k_)};
  }
  View Values(const CachedPlane& values) const {
    return {&values, v_, WidenScales(values, p_.value_dim, values.tile->live, v_)};
  }
  bool AllFinite(const View& values) const { return values.finite; }

  // `values` without slots that are not in the mask. It is valid until the next Keys().
  View Only(const View& values, uint64_t mask) const {
    return {values.plane, k_, WidenScales(*values.plane, p_.value_dim, mask, k_)};
  }

  // As Bf16DotMath's. `beside` has a step between the blocks of channels.
  template <int kQueries, class Beside>
  HWY_INLINE void Logits(const Query* HWY_RESTRICT q, const View& keys, int32_t /*pass*/,
                         float scale, float* HWY_RESTRICT logits, Beside& beside) const {
    LogitsOf<kQueries>(q, PackedElements(p_.queries.dtype, p_.key_dim), keys, p_.key_dim, scale,
                       logits, beside);
  }

  template <int kQueries>
  HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const View& values,
                             int32_t /*pass*/, const float* decay, float* HWY_RESTRICT sums,
                             int32_t stride) const {
    int32_t d = 0;
    for (; d + kValueColumns <= p_.value_dim; d += kValueColumns, sums += stride) {
      AccumulateOf<kQueries, 4>(weights, values, d, decay, sums);
    }
    const int32_t left = p_.value_dim - d;
    if (left == 2 * kCellColumns) {
      AccumulateOf<kQueries, 2>(weights, values, d, decay, sums);
    } else if (left == kCellColumns) {
      AccumulateOf<kQueries, 1>(weights, values, d, decay, sums);
    }
  }

 private:
  static constexpr int kColumns = static_cast<int>(kTileKeys) / kCellColumns;  // cells of a row

  // part[m][c] += the dot products of the query pairs of m with a cell of column vector c, for the
  // pairs of kKeyScaleRows cells of each. `factors`: `stride` pairs from one m to the next.
  template <int kQueries>
  static HWY_INLINE void AddKeyProducts(const uint32_t* HWY_RESTRICT factors, int32_t stride,
                                        const std::byte* const (&column)[kColumns],
                                        const ptrdiff_t (&ahead)[kColumns], size_t at,
                                        size_t row_bytes, __m512 (&part)[kQueries][kColumns]) {
    TRIBUTARY_UNROLL for (int row = 0; row < kKeyScaleRows; ++row) {
      __m512i cells[kColumns];
      TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) {
        AskFor(column[c] + at + ahead[c]);
        cells[c] = _mm512_loadu_si512(column[c] + at);
      }
      TRIBUTARY_UNROLL for (int i = 0; i < kWordElements; ++i) {
        __m512i pairs[kColumns];
        TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) pairs[c] = Nibbles(cells[c], i);
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const __m512bh factor =
              Bf16(_mm512_set1_epi32(static_cast<int>(factors[m * stride + i])));
          TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) {
            part[m][c] = _mm512_dpbf16_ps(part[m][c], factor, Bf16(pairs[c]));
          }
        }
      }
      at += row_bytes;
      factors += kWordElements;
    }
  }

  // Not inlined, as the next: what a caller keeps would take the registers of the sums.
  template <int kQueries, class Beside>
  static HWY_NOINLINE void LogitsOf(const Query* HWY_RESTRICT q, int32_t packed_elements,
                                    const View& keys, int32_t key_dim, float scale,
                                    float* HWY_RESTRICT logits, Beside& beside) {
    const CachedPlane& plane = *keys.plane;
    const int32_t tokens = plane.block_tokens();
    const size_t row_bytes = CellRowBytes(tokens);
    const std::byte* column[kColumns];
    ptrdiff_t ahead[kColumns];
    TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) {
      const int32_t first = c * kCellColumns;
      const int32_t block = first >> plane.tile->block_shift;
      column[c] = plane.block(block) + size_t(first & (tokens - 1)) / kCellColumns * kCellBytes;
      ahead[c] = plane.Ahead(block);
    }
    // Sums are in memory: a block of channels needs the registers. They are not in `logits`, which
    // `beside` reads.
    HWY_ALIGN float sums[kQueries * kTileKeys];
    Fill(sums, kQueries * kTileKeys, 0.0f);
    const auto* factors = reinterpret_cast<const uint32_t*>(q);
    for (int32_t piece = 0; piece < packed_elements; piece += key_dim) {
      const float* scales = keys.scales;
      size_t at = 0;
      TRIBUTARY_KEEP_ROLLED for (int32_t d = 0; d < key_dim; d += kNvfp4Block) {
        __m512 part[kQueries][kColumns];
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) part[m][c] = _mm512_setzero_ps();
        }
        AddKeyProducts<kQueries>(factors, packed_elements / 2, column, ahead, at, row_bytes, part);
        TRIBUTARY_UNROLL for (int c = 0; c < kColumns; ++c) {
          const __m512 of_block = _mm512_load_ps(scales + c * kCellColumns);
          TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
            float* sum = sums + m * kTileKeys + c * kCellColumns;
            _mm512_store_ps(sum, _mm512_fmadd_ps(part[m][c], of_block, _mm512_load_ps(sum)));
          }
        }
        beside.Step();
        factors += kNvfp4Block / 2;
        scales += kTileKeys;
        at += kKeyScaleRows * row_bytes;
      }
    }
    beside.Finish();
    const __m512 unit = _mm512_set1_ps(scale);
    for (int i = 0; i < kQueries * static_cast<int>(kTileKeys); i += kCellColumns) {
      _mm512_store_ps(logits + i, _mm512_mul_ps(_mm512_load_ps(sums + i), unit));
    }
  }

  // The weights of a tile times their scales in each of kGroups blocks of channels, in bf16 pieces.
  template <int kQueries, int kGroups>
  struct ScaledWeights {
    alignas(64) uint16_t pieces[kQueries][kGroups][kWeightPieces * kTileKeys];

    HWY_INLINE void Fill(const float* HWY_RESTRICT weights, const float* HWY_RESTRICT scales) {
      for (int64_t j = 0; j < kTileKeys; j += 2 * kCellColumns) {
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const __m512 w0 = _mm512_load_ps(weights + m * kTileKeys + j);
          const __m512 w1 = _mm512_load_ps(weights + m * kTileKeys + j + kCellColumns);
          TRIBUTARY_UNROLL for (int c = 0; c < kGroups; ++c) {
            const float* of = scales + c * kTileKeys + j;
            Bf16Weights<kWeightPieces>::Pack(_mm512_mul_ps(w0, _mm512_load_ps(of)),
                                             _mm512_mul_ps(w1, _mm512_load_ps(of + kCellColumns)),
                                             &pieces[m][c][j]);
          }
        }
      }
    }
    // Those of two tokens, counted from the tile's first; piece 0 is the high one.
    HWY_INLINE __m512bh Pair(int m, int c, int piece, int32_t pair) const {
      int32_t both;
      std::memcpy(&both, &pieces[m][c][piece * kTileKeys + 2 * pair], sizeof(both));
      return Bf16(_mm512_set1_epi32(both));
    }
  };

  // Of the kGroups * 16 channels of the plane that begins at channel `first`.
  template <int kQueries, int kGroups>
  static HWY_NOINLINE void AccumulateOf(const float* HWY_RESTRICT weights, const View& values,
                                        int32_t first, const float* decay,
                                        float* HWY_RESTRICT sums) {
    using Cells = Nvfp4ValueCells<kGroups>;
    const CachedPlane& plane = *values.plane;
    const int32_t tokens = plane.block_tokens();
    ScaledWeights<kQueries, kGroups> scaled;
    scaled.Fill(weights, values.scales + first / kNvfp4Block * kTileKeys);
    __m512 sum[kQueries][kGroups];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kGroups; ++c) {
        sum[m][c] = _mm512_mul_ps(_mm512_set1_ps(decay[m]),
                                  _mm512_load_ps(sums + m * kValueColumns + c * kCellColumns));
      }
    }
    // The low pieces first: small numbers before large ones.
    for (int piece = kWeightPieces - 1; piece >= 0; --piece) {
      int32_t pair = 0;
      for (int32_t block = 0; block < plane.blocks(); ++block) {
        const std::byte* cell = plane.block(block) + Nvfp4PlaneBytes(tokens, first);
        const ptrdiff_t ahead = plane.Ahead(block);
        const int32_t end = pair + tokens / 2;
        TRIBUTARY_KEEP_ROLLED for (; pair < end; pair += Cells::kPairs, cell += kCellBytes) {
          AskFor(cell + ahead);
          __m512i elements[Cells::kPairs][kGroups];
          Cells::Load(cell, elements);
          TRIBUTARY_UNROLL for (int i = 0; i < Cells::kPairs; ++i) {
            TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
              TRIBUTARY_UNROLL for (int c = 0; c < kGroups; ++c) {
                sum[m][c] = _mm512_dpbf16_ps(sum[m][c], scaled.Pair(m, c, piece, pair + i),
                                             Bf16(elements[i][c]));
              }
            }
          }
        }
      }
    }
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kGroups; ++c) {
        _mm512_store_ps(sums + m * kValueColumns + c * kCellColumns, sum[m][c]);
      }
    }
  }

  const ChunkParams& p_;
  float* const k_;  // block scales of a tile's keys, [key_dim / 16, kTileKeys]
  float* const v_;  // the same of its values
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
