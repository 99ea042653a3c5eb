// The arithmetic of AttendChunk with the bf16 dot-product instruction (AVX512_BF16: Zen 4, Sapphire
// Rapids and later), which multiplies two bf16 pairs and adds to a float: twice the rate of float
// multiply-add, on numbers half the size.
//
// Keys and values of bf16 and FP8 are exact in bf16. Queries and weights are cut into bf16 pieces
// that add up to them, as many as bf16_pieces.h says. Keys and values come in the planes of
// page_layout.h, so that both products are one: a pair of queries' channels, or of weights, in
// every lane, times a cell. Highway 1.0 has no such operation, hence intrinsics. For AVX3_DL only,
// see attend_chunk_bf16.cc.
#if defined(TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#undef TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#else
#define TRIBUTARY_KERNELS_CPU_BF16_DOT_MATH_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/bf16_pieces.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/pair_cells-inl.h"
#include "kernels/cpu/pair_planes-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"
#include "kernels/cpu/widen-inl.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

// `Cells` are those of the cache (pair_cells-inl.h).
template <class Cells, int kWeightPieces>
class Bf16DotMath {
 public:
  using Query = uint16_t;  // bf16 bits
  static constexpr int kQueryBlock = 4;

  // Planes where they lie in the cache, or converted to bf16 in scratch memory.
  struct View : PairTile {
    bool in_cache = false;
  };

  Bf16DotMath(const ChunkParams& p, std::byte* memory, const WorkspaceLayout& layout)
      : p_(p),
        k_(memory + layout.k),
        v_(memory + layout.v),
        keys_in_place_(InPlace(QueryPieces(p.queries.dtype))),
        values_in_place_(InPlace(kWeightPieces)) {}

  static int32_t PackedElements(DType type, int32_t head_dim) {
    return QueryPieces(type) * head_dim;
  }

  // The pieces one after another.
  static HWY_INLINE void PackQuery(DType type, const std::byte* src, int32_t head_dim,
                                   Query* packed) {
    const int pieces = QueryPieces(type);
    if (pieces == 1) {
      std::memcpy(packed, src, head_dim * sizeof(Query));
      return;
    }
    HWY_ALIGN float wide[kValueColumns];
    for (int32_t block = 0; block < head_dim; block += kValueColumns) {
      WidenRow(type, src + block * SizeOf(type), wide, kValueColumns);
      for (int32_t i = 0; i < kValueColumns; i += 16) {
        __m512 rest = _mm512_load_ps(wide + i);
        for (int piece = 0; piece < pieces; ++piece) {
          const __m512i cut = CutToBf16(rest);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + piece * head_dim + block + i),
                              _mm512_cvtepi32_epi16(_mm512_srli_epi32(cut, 16)));
          // Infinity and NaN are whole in the first piece.
          const __mmask16 finite = ~_mm512_fpclass_ps_mask(rest, kNotFinite);
          rest = _mm512_maskz_sub_ps(finite, rest, _mm512_castsi512_ps(cut));
        }
      }
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

  View Keys(const Tile& tile, int32_t head) const {
    const std::byte* source = p_.kv.k + head * p_.kv.head_bytes;
    if (p_.kv.pages == nullptr) {
      PackDenseKeys(source, p_.kv.row_bytes, tile, p_.head_dim, k_);
      return Scratch(k_);
    }
    if (keys_in_place_) return View{{source, &tile}, /*in_cache=*/true};
    ConvertKeys<Cells>(PairTile{source, &tile}, p_.head_dim, k_);
    return Scratch(k_);
  }

  // Slots that are not live stand as zeros: what lies there may be NaN.
  View Values(const Tile& tile, int32_t head) const {
    const std::byte* source = p_.kv.v + head * p_.kv.head_bytes;
    if (p_.kv.pages == nullptr) {
      PackDenseValues(source, p_.kv.row_bytes, tile, p_.head_dim, v_);
      return Scratch(v_);
    }
    if (values_in_place_ && tile.live == kWholeTile)
      return View{{source, &tile}, /*in_cache=*/true};
    ConvertValues<Cells>(PairTile{source, &tile}, tile.live, p_.head_dim, v_);
    return Scratch(v_);
  }

  bool AllFinite(const View& values) const {
    return values.in_cache ? AllPairsFinite<Cells>(values, p_.head_dim)
                           : AllPairsFinite<Bf16Cells>(values, p_.head_dim);
  }

  // `values` with zeros in the place of slots that the mask has not. Until the next Keys().
  View Only(const View& values, uint64_t mask) const {
    if (values.in_cache) {
      ConvertValues<Cells>(values, mask, p_.head_dim, k_);
    } else {
      ConvertValues<Bf16Cells>(values, mask, p_.head_dim, k_);
    }
    return Scratch(k_);
  }

  // logits[m * kTileKeys + j] = q[m] . k[j].
  template <int kQueries>
  HWY_INLINE void Logits(const Query* HWY_RESTRICT q, const View& keys, float* HWY_RESTRICT logits,
                         ReadAhead& ahead) const {
    if (keys.in_cache) {
      LogitsOf<Cells, kQueries>(q, keys, logits, ahead);
    } else {
      LogitsOf<Bf16Cells, kQueries>(q, keys, logits, ahead);
    }
  }

  // sums[m] = decay[m] * sums[m] + sum over the keys j of weights[m][j] * v[j].
  template <int kQueries>
  HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const View& values,
                             const float* decay, float* HWY_RESTRICT sums, ReadAhead& ahead) const {
    if (values.in_cache) {
      AccumulateOf<Cells, kQueries>(weights, values, decay, sums, ahead);
    } else {
      AccumulateOf<Bf16Cells, kQueries>(weights, values, decay, sums, ahead);
    }
  }

 private:
  // Picks the upper half of every float of two vectors.
  alignas(64) static constexpr uint16_t kOddHalves[32] = {
      1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  static constexpr int kNotFinite = 0x01 | 0x08 | 0x10 | 0x80;  // NaN, infinities

  // The upper half of every float. NaN stays NaN.
  static HWY_INLINE __m512i CutToBf16(__m512 x) {
    const __m512i bits =
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x400000));
  }

  static View Scratch(const std::byte* planes) {
    return View{{planes, &kOneBlock}, /*in_cache=*/false};
  }

  bool InPlace(int passes) const {
    return !IsFp8(p_.kv_dtype) || ReadsFloat8InPlace(p_.queries.rows * p_.queries.heads, passes);
  }

  // sum[m][c] += the dot products of the pairs of factors m with the cells of column vector c.
  // `factors` are pairs of bf16, kFactors of them from one m to the next.
  template <class SomeCells, int kQueries>
  static HWY_INLINE void AddProducts(const uint32_t* HWY_RESTRICT factors, int32_t stride,
                                     const std::byte* const (&column)[4], size_t row_bytes,
                                     int32_t rows, __m512 (&sum)[kQueries][4], ReadAhead& ahead) {
    size_t at = 0;
    for (int32_t row = 0; row < rows; ++row, at += row_bytes, factors += SomeCells::kPairs) {
      ahead.Step();
      // All cells before any product: the loads that wait for memory are then early in the order of
      // the program, and more of them are under way at once.
      __m512i pairs[4][SomeCells::kPairs];
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) SomeCells::Load(column[c] + at, pairs[c]);
      TRIBUTARY_UNROLL for (int i = 0; i < SomeCells::kPairs; ++i) {
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const __m512bh factor =
              Bf16(_mm512_set1_epi32(static_cast<int>(factors[m * stride + i])));
          TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
            sum[m][c] = _mm512_dpbf16_ps(sum[m][c], factor, Bf16(pairs[c][i]));
          }
        }
      }
    }
  }

  template <class SomeCells, int kQueries>
  HWY_INLINE void LogitsOf(const Query* HWY_RESTRICT q, const PairTile& keys,
                           float* HWY_RESTRICT logits, ReadAhead& ahead) const {
    const int32_t tokens = keys.block_tokens();
    const std::byte* column[4];
    TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
      const int32_t first = c * kCellColumns;
      column[c] = keys.block(first >> keys.tile->block_shift) +
                  size_t(first & (tokens - 1)) / kCellColumns * kCellBytes;
    }
    __m512 sum[kQueries][4];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) sum[m][c] = _mm512_setzero_ps();
    }
    const int pieces = QueryPieces(p_.queries.dtype);
    const auto* pairs = reinterpret_cast<const uint32_t*>(q);
    for (int piece = 0; piece < pieces; ++piece) {
      AddProducts<SomeCells, kQueries>(pairs + piece * p_.head_dim / 2, pieces * p_.head_dim / 2,
                                       column, CellRowBytes(tokens),
                                       p_.head_dim / 2 / SomeCells::kPairs, sum, ahead);
    }
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
        _mm512_store_ps(logits + m * kTileKeys + c * kCellColumns, sum[m][c]);
      }
    }
  }

  template <class SomeCells, int kQueries>
  HWY_INLINE void AccumulateOf(const float* HWY_RESTRICT weights, const PairTile& values,
                               const float* decay, float* HWY_RESTRICT sums,
                               ReadAhead& ahead) const {
    const int32_t tokens = values.block_tokens();
    const size_t plane_bytes = size_t(tokens) * kValueColumns * SomeCells::kElementBytes;
    const auto* pairs = reinterpret_cast<const uint32_t*>(weights);
    for (int32_t plane = 0; plane < p_.head_dim / kValueColumns; ++plane) {
      float* HWY_RESTRICT out = sums + plane * kValueColumns;
      __m512 sum[kQueries][4];
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
          sum[m][c] = _mm512_mul_ps(_mm512_set1_ps(decay[m]),
                                    _mm512_load_ps(out + m * p_.head_dim + c * kCellColumns));
        }
      }
      // The low pieces first: small numbers before large ones.
      for (int piece = kWeightPieces - 1; piece >= 0; --piece) {
        for (int32_t block = 0; block < values.blocks(); ++block) {
          const std::byte* column[4];
          TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
            column[c] = values.block(block) + plane * plane_bytes + c * kCellBytes;
          }
          const int32_t first = piece * kTileKeys + block * tokens;
          AddProducts<SomeCells, kQueries>(pairs + first / 2, kTileKeys, column,
                                           CellRowBytes(kValueColumns),
                                           tokens / 2 / SomeCells::kPairs, sum, ahead);
        }
      }
      TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
        TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
          _mm512_store_ps(out + m * p_.head_dim + c * kCellColumns, sum[m][c]);
        }
      }
    }
  }

  const ChunkParams& p_;
  std::byte* const k_;  // bf16 planes of a tile
  std::byte* const v_;
  const bool keys_in_place_;
  const bool values_in_place_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
