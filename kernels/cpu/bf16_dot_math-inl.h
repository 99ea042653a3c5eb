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
#include "kernels/cpu/bf16_operands-inl.h"
#include "kernels/cpu/bf16_pieces.h"
#include "kernels/cpu/chunk_tiles.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/pair_cells-inl.h"
#include "kernels/cpu/pair_planes-inl.h"
#include "kernels/cpu/tiling.h"
#include "kernels/cpu/unroll.h"

#if HWY_TARGET == HWY_AVX3_DL

#include <immintrin.h>

#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace tributary::cpu {
namespace HWY_NAMESPACE {
namespace {

// `Cells` are those of the cache (pair_cells-inl.h).
template <class Cells, int kWeightPieces>
class Bf16DotMath : public Bf16Queries {
 public:
  static constexpr int kQueryBlock = 4;

  // Planes where they lie in the cache, or converted to bf16 in scratch memory.
  struct View {
    const CachedPlane* plane = nullptr;
    bool in_cache = false;
  };

  Bf16DotMath(const ChunkParams& p, std::byte* memory, const WorkspaceLayout& layout)
      : p_(p),
        k_(memory + layout.k),
        v_(memory + layout.v),
        k_scratch_{{k_, &kOneBlock}, {}},
        v_scratch_{{v_, &kOneBlock}, {}},
        keys_in_place_(InPlace(QueryPieces(p.queries.dtype))),
        values_in_place_(InPlace(kWeightPieces)) {}

  // Stores the pieces for keys [first, first + kWeighedKeys) of a tile.
  static HWY_INLINE void PackWeights(const float* weights, int64_t first, float* packed) {
    auto* pieces = reinterpret_cast<uint16_t*>(packed);
    for (int64_t j = first; j < first + kWeighedKeys; j += 32) {
      Bf16Weights<kWeightPieces>::Pack(_mm512_load_ps(weights + j),
                                       _mm512_load_ps(weights + j + 16), pieces + j);
    }
  }

  View Keys(const CachedPlane& keys) const {
    if (p_.kv.pages == nullptr) {
      PackDenseKeys(keys.head, p_.kv.key_row_bytes, *keys.tile, p_.key_dim, k_);
      return View{&k_scratch_};
    }
    if (keys_in_place_) return View{&keys, /*in_cache=*/true};
    ConvertKeys<Cells>(keys, p_.key_dim, k_);
    return View{&k_scratch_};
  }

  // Slots that are not live stand as zeros: what lies there may be NaN.
  View Values(const CachedPlane& values) const {
    const Tile& tile = *values.tile;
    if (p_.kv.pages == nullptr) {
      PackDenseValues(values.head, p_.kv.value_row_bytes, tile, p_.value_dim, v_);
      return View{&v_scratch_};
    }
    if (values_in_place_ && tile.live == kWholeTile) return View{&values, /*in_cache=*/true};
    ConvertValues<Cells>(values, tile.live, p_.value_dim, v_);
    return View{&v_scratch_};
  }

  bool AllFinite(const View& values) const {
    return values.in_cache ? AllPairsFinite<Cells>(*values.plane, p_.value_dim)
                           : AllPairsFinite<Bf16Cells>(*values.plane, p_.value_dim);
  }

  // `values` with zeros in the place of slots that are not in the mask. It is valid until the next
  // Keys().
  View Only(const View& values, uint64_t mask) const {
    if (values.in_cache) {
      ConvertValues<Cells>(*values.plane, mask, p_.value_dim, k_);
    } else {
      ConvertValues<Bf16Cells>(*values.plane, mask, p_.value_dim, k_);
    }
    return View{&k_scratch_};
  }

  // logits[m * kTileKeys + j] = scale * (q[m] . k[j]). `beside` is work for the time that loads
  // take: a step of it now and then between the products, all of it before a logit is stored.
  // `pass` counts the blocks of queries that read the plane: each asks memory for other lines.
  template <int kQueries, class Beside>
  HWY_INLINE void Logits(const Query* HWY_RESTRICT q, const View& keys, int32_t pass, float scale,
                         float* HWY_RESTRICT logits, Beside& beside) const {
    const int pieces = QueryPieces(p_.queries.dtype);
    if (keys.in_cache) {
      LogitsOf<Cells, kQueries>(q, pieces, *keys.plane, pass, p_.key_dim, scale, logits, beside);
    } else {
      LogitsOf<Bf16Cells, kQueries>(q, pieces, *keys.plane, pass, p_.key_dim, scale, logits,
                                    beside);
    }
  }

  // sums[m] = decay[m] * sums[m] + sum over the keys j of weights[m][j] * v[j]. Of every sums[m]
  // there are kValueColumns channels, one m after another, and `stride` numbers on the next.
  template <int kQueries>
  HWY_INLINE void Accumulate(const float* HWY_RESTRICT weights, const View& values, int32_t pass,
                             const float* decay, float* HWY_RESTRICT sums, int32_t stride) const {
    int32_t d = 0;
    for (; d + kValueColumns <= p_.value_dim; d += kValueColumns, sums += stride) {
      AccumulatePlane<kQueries, 4>(weights, values, pass, d, decay, sums);
    }
    const int32_t left = p_.value_dim - d;
    if (left == 2 * kCellColumns) {
      AccumulatePlane<kQueries, 2>(weights, values, pass, d, decay, sums);
    } else if (left == kCellColumns) {
      AccumulatePlane<kQueries, 1>(weights, values, pass, d, decay, sums);
    }
  }

 private:
  bool InPlace(int passes) const {
    return !IsFp8(p_.kv_dtype) || ReadsFloat8InPlace(p_.queries.rows * p_.queries.heads, passes);
  }

  // From a row of cells to the first line to ask for.
  template <class SomeCells>
  static HWY_INLINE size_t FirstLine(int32_t pass) {
    return pass * SomeCells::kAskedLines % 4 * kCellBytes;
  }

  // The channels of one plane, kCells * kCellColumns of them.
  template <int kQueries, int kCells>
  static HWY_INLINE void AccumulatePlane(const float* HWY_RESTRICT weights, const View& values,
                                         int32_t pass, int32_t first, const float* decay,
                                         float* HWY_RESTRICT sums) {
    if (values.in_cache) {
      AccumulateOf<Cells, kQueries, kCells>(weights, *values.plane, pass, first, decay, sums);
    } else {
      AccumulateOf<Bf16Cells, kQueries, kCells>(weights, *values.plane, pass, first, decay, sums);
    }
  }

  // Rows of cells to multiply between two steps of other work: eight, which the compiler then
  // knows, or the next number that divides the rows.
  static constexpr std::integral_constant<int32_t, 8> kRowsPerRun{};
  static HWY_INLINE int32_t RowsPerRun(int32_t rows) {
    for (int32_t run = kRowsPerRun + 1; run < rows; ++run) {
      if (rows % run == 0) return run;
    }
    return rows;
  }

  // sum[m][c] += the dot products of the pairs of factors m with the cells of column vector c, over
  // `rows` rows of kCells cells. `factors` are pairs of bf16, `stride` of them from one m to the
  // next. Asks memory for lines of as much as is read, from `ahead` on.
  template <class SomeCells, int kQueries, int kCells>
  static HWY_INLINE void AddProducts(const uint32_t* HWY_RESTRICT factors, int32_t stride,
                                     const std::byte* const (&column)[kCells], size_t row_bytes,
                                     int32_t rows, const std::byte* ahead,
                                     __m512 (&sum)[kQueries][kCells]) {
    size_t at = 0;
    TRIBUTARY_KEEP_ROLLED for (int32_t row = 0; row < rows; ++row) {
      TRIBUTARY_UNROLL for (int line = 0; line < SomeCells::kAskedLines; ++line) {
        AskFor(ahead + line * kCellBytes);
      }
      // All cells before any product: the loads that wait for memory are then early in the order of
      // the program, and more of them are under way at once.
      __m512i pairs[kCells][SomeCells::kPairs];
      TRIBUTARY_UNROLL for (int c = 0; c < kCells; ++c) SomeCells::Load(column[c] + at, pairs[c]);
      TRIBUTARY_UNROLL for (int i = 0; i < SomeCells::kPairs; ++i) {
        TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
          const __m512bh factor =
              Bf16(_mm512_set1_epi32(static_cast<int>(factors[m * stride + i])));
          TRIBUTARY_UNROLL for (int c = 0; c < kCells; ++c) {
            sum[m][c] = _mm512_dpbf16_ps(sum[m][c], factor, Bf16(pairs[c][i]));
          }
        }
      }
      at += row_bytes;
      ahead += kCells * kCellBytes;
      factors += SomeCells::kPairs;
    }
  }

  // Not inlined, as the next: what a caller keeps would take the registers of the sums.
  template <class SomeCells, int kQueries, class Beside>
  static HWY_NOINLINE void LogitsOf(const Query* HWY_RESTRICT q, int pieces,
                                    const CachedPlane& keys, int32_t pass, int32_t key_dim,
                                    float scale, float* HWY_RESTRICT logits, Beside& beside) {
    if constexpr (!SomeCells::kWorkBeside) beside.Finish();
    const int32_t tokens = keys.block_tokens();
    const size_t row_bytes = CellRowBytes(tokens);
    const int32_t rows = key_dim / 2 / SomeCells::kPairs / keys.blocks();
    __m512 sum[kQueries][4];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) sum[m][c] = _mm512_setzero_ps();
    }
    for (int piece = 0; piece < pieces; ++piece) {
      const auto* factors = reinterpret_cast<const uint32_t*>(q + piece * key_dim);
      const std::byte* column[4];
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
        const int32_t first = c * kCellColumns;
        column[c] = keys.block(first >> keys.tile->block_shift) +
                    size_t(first & (tokens - 1)) / kCellColumns * kCellBytes;
      }
      // A row has cells of every block. What lies ahead is asked for block after block.
      for (int32_t block = 0; block < keys.blocks(); ++block) {
        const std::byte* ahead = keys.block(block) + keys.Ahead(block) + FirstLine<SomeCells>(pass);
        const auto add_in_runs_of = [&](auto run) HWY_ATTR {
          for (int32_t row = 0; row < rows; row += run) {
            if constexpr (SomeCells::kWorkBeside) beside.Step();
            AddProducts<SomeCells, kQueries, 4>(factors, pieces * key_dim / 2, column, row_bytes,
                                                run, ahead, sum);
            factors += run * SomeCells::kPairs;
            TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) column[c] += run * row_bytes;
            ahead += run * 4 * kCellBytes;
          }
        };
        if constexpr (!SomeCells::kWorkBeside) {
          add_in_runs_of(rows);
        } else if (HWY_LIKELY(rows % kRowsPerRun == 0)) {
          add_in_runs_of(kRowsPerRun);
        } else {
          add_in_runs_of(RowsPerRun(rows));
        }
      }
    }
    if constexpr (SomeCells::kWorkBeside) beside.Finish();
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < 4; ++c) {
        _mm512_store_ps(logits + m * kTileKeys + c * kCellColumns,
                        _mm512_mul_ps(sum[m][c], _mm512_set1_ps(scale)));
      }
    }
  }

  // Of the kCells * kCellColumns channels of the plane that begins at channel `first`.
  template <class SomeCells, int kQueries, int kCells>
  static HWY_NOINLINE void AccumulateOf(const float* HWY_RESTRICT weights,
                                        const CachedPlane& values, int32_t pass, int32_t first,
                                        const float* decay, float* HWY_RESTRICT sums) {
    const int32_t tokens = values.block_tokens();
    const size_t plane = size_t(tokens) * first * SomeCells::kElementBytes;
    const auto* pairs = reinterpret_cast<const uint32_t*>(weights);
    __m512 sum[kQueries][kCells];
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kCells; ++c) {
        sum[m][c] = _mm512_mul_ps(_mm512_set1_ps(decay[m]),
                                  _mm512_load_ps(sums + m * kValueColumns + c * kCellColumns));
      }
    }
    // The low pieces first: small numbers before large ones.
    for (int piece = kWeightPieces - 1; piece >= 0; --piece) {
      for (int32_t block = 0; block < values.blocks(); ++block) {
        const std::byte* const cells = values.block(block) + plane;
        const std::byte* column[kCells];
        TRIBUTARY_UNROLL for (int c = 0; c < kCells; ++c) column[c] = cells + c * kCellBytes;
        const int32_t key = piece * kTileKeys + block * tokens;
        AddProducts<SomeCells, kQueries, kCells>(
            pairs + key / 2, kTileKeys, column, CellRowBytes(kCells * kCellColumns),
            tokens / 2 / SomeCells::kPairs,
            cells + values.Ahead(block) + FirstLine<SomeCells>(pass), sum);
      }
    }
    TRIBUTARY_UNROLL for (int m = 0; m < kQueries; ++m) {
      TRIBUTARY_UNROLL for (int c = 0; c < kCells; ++c) {
        _mm512_store_ps(sums + m * kValueColumns + c * kCellColumns, sum[m][c]);
      }
    }
  }

  const ChunkParams& p_;
  std::byte* const k_;  // bf16 planes of a tile
  std::byte* const v_;
  const CachedPlane k_scratch_;
  const CachedPlane v_scratch_;
  const bool keys_in_place_;
  const bool values_in_place_;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tributary::cpu
HWY_AFTER_NAMESPACE();

#endif  // HWY_TARGET == HWY_AVX3_DL

#endif  // include guard, toggled once a target
