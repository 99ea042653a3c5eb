// Queries as operand A of products with an FP8 cache, for wgmma_fp8_attention.cuh: bf16 cut into
// pieces of e4m3.
#pragma once

#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/decode/sm90/wgmma_nvfp4_queries.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/wgmma_fp8.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// Sixteen elements of a query: their e4m3 roundings, and what the rounding lost, in e4m3 too.
struct QueryPieces {
  uint4 high;
  uint4 low;
};

// Cuts kQueries queries into pieces. kVectors neighbouring lanes hold a whole query in bf16;
// words[.][i] is this lane's part of the i-th one. A query is first multiplied by a power of two
// that brings its largest element just below 2^8. The sum of the two pieces is then exactly the
// bf16 element, except for elements under 2^-10 of the largest: these lose what is below 2^-18 of
// it.
//
// The queries are cut side by side, so that one fills the waits of the other.
template <int kVectors, int kQueries>
__device__ __forceinline__ void CutQueries(const uint32_t (&words)[kQueries][8],
                                           float (&scales)[kQueries],
                                           QueryPieces (&pieces)[kQueries]) {
  uint32_t largest[kQueries] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      largest[n] = MaxOfPairs<DType::kBf16>(largest[n], words[n][i] & 0x7fff7fffu);
    }
  }
#pragma unroll
  for (int lane = kVectors / 2; lane > 0; lane /= 2) {
    uint32_t other[kQueries];
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      other[n] = __shfl_xor_sync(0xffffffffu, largest[n], lane);
    }
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      largest[n] = MaxOfPairs<DType::kBf16>(largest[n], other[n]);
    }
  }
  float factors[kQueries];
#pragma unroll
  for (int n = 0; n < kQueries; ++n) {
    const float max_abs =
        fmaxf(__uint_as_float(largest[n] << 16), __uint_as_float(largest[n] & 0xffff0000u));
    const PowerOfTwo normaliser = Fp8QueryNormaliser(max_abs);
    // The sign of a negative scale goes into the query, so that the largest product is the largest
    // logit.
    factors[n] = scales[n] < 0.0f ? -normaliser.value : normaliser.value;
    scales[n] = fabsf(scales[n]) * normaliser.inverse;
  }
  uint32_t high[kQueries][8], low[kQueries][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
      const float a = __uint_as_float(words[n][i] << 16) * factors[n];
      const float b = __uint_as_float(words[n][i] & 0xffff0000u) * factors[n];
      high[n][i] = PackE4M3(a, b);
      const uint32_t wide = WidenE4M3<false>(high[n][i]);
      const float2 cut = __half22float2(*reinterpret_cast<const __half2*>(&wide));
      low[n][i] = PackE4M3(a - cut.x, b - cut.y);
    }
  }
  const auto join = [](const uint32_t(&x)[8]) {
    return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
  };
#pragma unroll
  for (int n = 0; n < kQueries; ++n) pieces[n] = {join(high[n]), join(low[n])};
}

// Where 16 bytes of an uncut query lie: eight packed rows' are read from different banks.
template <int kHeadDim>
__device__ __forceinline__ int RawQueryPlace(int packed_row, int chunk) {
  return packed_row * (2 * kHeadDim) + (chunk ^ packed_row % 8) * 16;
}

// Where a 16-byte chunk of a query lies that comes `pairs` pairs of chunks behind the one at
// `first`. Rows have four pairs, so two pieces of 64 dimensions share a row. (The numbers of both
// pairs in the row have no bit in common.)
__device__ __forceinline__ int PairsFurther(int first, int pairs) {
  return pairs / 4 * (64 * kTileRowBytes) + (first ^ pairs % 4 * 32);
}

// Brings an item's queries to shared memory, cut into pieces. A thread takes 16 dimensions of each
// of two packed rows. Locate finds where they are, which needs no query; Ask begins to copy them;
// Finish cuts them.
template <typename Traits>
class PieceStager {
 public:
  using Shared = typename Traits::Shared;

  __device__ __forceinline__ void Locate(const AttentionArgs& args, const WorkItem& item) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int packed_row = PackedRowOf(i);
      alive_[i] = packed_row < item.packed_count;
      from_[i] = static_cast<const std::byte*>(args.q) +
                 (OutputIndex(args, item, alive_[i] ? packed_row : 0) * kVectors +
                  threadIdx.x % kVectors) *
                     kBytes;
    }
    const int packed_row = threadIdx.x % Traits::kTileRows;
    keys_alive_ = packed_row < item.packed_count;
    keys_ = args.keys + item.row_begin + QueryRowOf(args, item, keys_alive_ ? packed_row : 0);
    scale_ = args.sm_scale * KeyScale<Traits::kKv>(args, item);
  }
  // Asks L2 for the queries.
  __device__ __forceinline__ void Prefetch() const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      PrefetchToL2(from_[i]);
    }
    PrefetchToL2(keys_);
  }
  __device__ __forceinline__ void Ask(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      CopyAsync16OrZero(shared.raw + RawPlace(i, 0), from_[i], alive_[i]);
      CopyAsync16OrZero(shared.raw + RawPlace(i, 1), from_[i] + 16, alive_[i]);
    }
    // There is no branch on the thread here; see UniformZero.
    if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) < Traits::kTileRows / 32) {
      CopyAsync8OrZero(&shared.packed_rows.keys[threadIdx.x % Traits::kTileRows], keys_,
                       keys_alive_);
    }
  }
  // Called after WaitForCopies. The caller synchronises the computing threads afterwards.
  __device__ __forceinline__ void Finish(Shared& shared) const {
    uint32_t words[kOfThread][8];
    float scales[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const uint4 first = *reinterpret_cast<const uint4*>(shared.raw + RawPlace(i, 0));
      const uint4 second = *reinterpret_cast<const uint4*>(shared.raw + RawPlace(i, 1));
      words[i][0] = first.x, words[i][1] = first.y, words[i][2] = first.z, words[i][3] = first.w;
      words[i][4] = second.x, words[i][5] = second.y, words[i][6] = second.z,
      words[i][7] = second.w;
      scales[i] = scale_;
    }
    if constexpr (OfNvfp4<Traits>) {
      StoreWhole(words, scales, shared);
    } else {
      StorePieces(words, scales, shared);
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int packed_row = PackedRowOf(i);
      // Scores that are masked are -inf, and 0 * -inf is NaN.
      constexpr float kLeast = 1.17549435e-38f;
      const float scale = scales[i] * kLog2E;
      if (threadIdx.x % kVectors == 0) {
        shared.packed_rows.scale[packed_row] = scale == 0.0f ? kLeast : scale;
      }
    }
  }

 private:
  static constexpr int kBytes = 32;
  static constexpr int kVectors = Traits::kHeadDim / 16;  // lanes that share a packed row
  static constexpr int kOfThread = Traits::kTileRows * kVectors / Traits::kThreads;

  static __device__ __forceinline__ void StorePieces(const uint32_t (&words)[kOfThread][8],
                                                     float (&scales)[kOfThread], Shared& shared) {
    QueryPieces pieces[kOfThread];
    CutQueries<kVectors>(words, scales, pieces);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = SwizzledChunk(PackedRowOf(i), threadIdx.x % kVectors);
      *reinterpret_cast<uint4*>(shared.q[0] + at) = pieces[i].high;
      if constexpr (Traits::kPieces == 2) {
        const int low = PairsFurther(at, Traits::kHeadDim / 32);
        *reinterpret_cast<uint4*>(shared.q[0] + low) = pieces[i].low;
      }
    }
  }
  // In f16 a row's first 64 dimensions are one piece, the others the second.
  static __device__ __forceinline__ void StoreWhole(const uint32_t (&words)[kOfThread][8],
                                                    float (&scales)[kOfThread], Shared& shared) {
    WholeQuery queries[kOfThread];
    NormaliseQueries<kVectors>(words, scales, queries);
    const int vector = threadIdx.x % kVectors;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = vector % (kVectors / 2) * 2 + half;
        *reinterpret_cast<uint4*>(shared.q[vector / (kVectors / 2)] +
                                  SwizzledChunk(PackedRowOf(i), chunk)) = queries[i].halves[half];
      }
    }
  }

  static __device__ __forceinline__ int PackedRowOf(int i) {
    return (i * Traits::kThreads + static_cast<int>(threadIdx.x)) / kVectors;
  }
  // The first or the second half of what this thread takes of its i-th packed row.
  static __device__ __forceinline__ int RawPlace(int i, int half) {
    static_assert(kBytes * kVectors == 2 * Traits::kHeadDim);
    return RawQueryPlace<Traits::kHeadDim>(PackedRowOf(i),
                                           static_cast<int>(threadIdx.x) % kVectors * 2 + half);
  }

  const std::byte* from_[kOfThread];
  bool alive_[kOfThread];
  const RowKeys* keys_;
  bool keys_alive_;
  float scale_ = 1.0f;
};

}  // namespace tributary::cuda
