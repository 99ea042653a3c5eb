// Queries as operand A of products with an FP8 cache, for wgmma_fp8_attention.cuh: bf16 cut into
// pieces of e4m3.
#pragma once

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda/wgmma_fp8.cuh"
#include "kernels/cuda/widen.cuh"

namespace tributary::cuda {

// Sixteen elements of a query as two times sixteen e4m3.
struct QueryPieces {
  uint4 high;
  uint4 low;
};

// kVectors neighbouring lanes hold the whole of a query, in bf16. The pieces are of a query that a
// power of two has brought just below 2^8: the sum of the two is then exactly what a bf16 was, but
// for elements that are less than 2^-10 of the largest, which lose what is below 2^-18 of that.
template <int kVectors>
__device__ __forceinline__ QueryPieces CutQuery(const uint4 (&raw)[2], float& scale) {
  const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                             raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = MaxOfPairs<DType::kBf16>(largest, words[i] & 0x7fff7fffu);
  }
#pragma unroll
  for (int lane = kVectors / 2; lane > 0; lane /= 2) {
    largest = MaxOfPairs<DType::kBf16>(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
  }
  const float max_abs =
      fmaxf(__uint_as_float(largest << 16), __uint_as_float(largest & 0xffff0000u));
  const PowerOfTwo normaliser = QueryNormaliser<8>(max_abs);
  // A negative scale goes to the query: the largest product is then the largest logit. What is not
  // finite must not become finite.
  float factor = scale < 0.0f ? -normaliser.value : normaliser.value;
  if (!(max_abs < INFINITY)) factor = NAN;
  scale = fabsf(scale) * normaliser.inverse;
  uint32_t high[8], low[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __uint_as_float(words[i] << 16) * factor;
    const float b = __uint_as_float(words[i] & 0xffff0000u) * factor;
    high[i] = PackE4M3(a, b);
    const uint32_t wide = WidenE4M3<false>(high[i]);
    const float2 cut = __half22float2(*reinterpret_cast<const __half2*>(&wide));
    low[i] = PackE4M3(a - cut.x, b - cut.y);
  }
  const auto join = [](const uint32_t(&x)[8]) {
    return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
  };
  return {join(high), join(low)};
}

// Brings an item's queries to shared memory, cut into pieces. Where they are is found first, what
// needs no queries; a thread takes 16 dimensions of each of two columns.
template <typename Traits>
class PieceStager {
 public:
  using Shared = typename Traits::Shared;

  __device__ __forceinline__ void Locate(const AttentionArgs& args, const WorkItem& item) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int column = ColumnOf(i);
      alive_[i] = column < item.column_count;
      from_[i] =
          static_cast<const std::byte*>(args.q) +
          (OutputIndex(args, item, alive_[i] ? column : 0) * kVectors + threadIdx.x % kVectors) *
              kBytes;
    }
    const int column = threadIdx.x % Traits::kColumns;
    keys_alive_ = column < item.column_count;
    keys_ = args.keys + item.row_begin + RowOfColumn(args, item, keys_alive_ ? column : 0);
    scale_ = args.sm_scale * (args.k_scale == nullptr ? 1.0f : __ldg(args.k_scale + item.kv_head));
  }
  // Asks L2 for them.
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
      std::byte* to = shared.raw + (i * Traits::kThreads + threadIdx.x) * kBytes;
      CopyAsync16OrZero(to, from_[i], alive_[i]);
      CopyAsync16OrZero(to + 16, from_[i] + 16, alive_[i]);
    }
    // (By several threads each: without branches, see UniformZero.)
    CopyAsync8OrZero(&shared.columns.keys[threadIdx.x % Traits::kColumns], keys_, keys_alive_);
  }
  // After WaitForCopies; the caller synchronises.
  __device__ __forceinline__ void Finish(Shared& shared) const {
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(
          shared.raw + (i * Traits::kThreads + threadIdx.x) * kBytes);
      const uint4 words[2] = {from[0], from[1]};
      float scale = scale_;
      const QueryPieces pieces = CutQuery<kVectors>(words, scale);
      const int column = ColumnOf(i);
      const int at = SwizzledChunk(column, threadIdx.x % kVectors);
      *reinterpret_cast<uint4*>(shared.q[0] + at) = pieces.high;
      *reinterpret_cast<uint4*>(shared.q[1] + at) = pieces.low;
      if (threadIdx.x % kVectors == 0) shared.columns.scale[column] = scale * kLog2E;
    }
  }

 private:
  static constexpr int kBytes = 32;
  static constexpr int kVectors = Traits::kHeadDim / 16;  // lanes that share a column
  static constexpr int kOfThread = Traits::kColumns * kVectors / Traits::kThreads;

  static __device__ __forceinline__ int ColumnOf(int i) {
    return (i * Traits::kThreads + static_cast<int>(threadIdx.x)) / kVectors;
  }

  const std::byte* from_[kOfThread];
  bool alive_[kOfThread];
  const RowKeys* keys_;
  bool keys_alive_;
  float scale_ = 1.0f;
};

}  // namespace tributary::cuda
