// A draft's block beside its context, for wgmma_fp8_attention.cuh.
//
// The warpgroup that widens V has nothing to do until an item's first values have come. Before that
// it attends to the block, if the item is a job's first piece, and one of the warpgroups that
// compute begins its sums with what it found instead of with nothing. So a block costs a launch
// next to nothing, where a launch of its own waits for this one to end. What is needed for it has
// its place among tiles of widened V, before the first of them.
#pragma once

#include <climits>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/draft_block.cuh"
#include "kernels/cuda/wgmma_block.cuh"
#include "kernels/cuda/wgmma_fp8.cuh"

namespace tributary::cuda {

// Whether this block of threads attends to a draft's block with an item.
__device__ __forceinline__ bool HasDraftBlock(const AttentionArgs& args, const WorkItem& item,
                                              const ClusterPlace& place) {
  const int head = item.kv_head - args.block.kv_head_begin;
  return place.rank == 0 && item.partial_index == 0 && head >= 0 && head < args.block.kv_head_count;
}

// What a warpgroup begins with, besides its output: as its own sums and references.
template <int kColumns>
struct DraftSums {
  float sum[kColumns];
  float reference[kColumns];
};
// The output, of every thread as it has its accumulators.
template <typename Traits>
__device__ __forceinline__ float4 (&DraftOutput(typename Traits::Shared& shared))[16][128] {
  static_assert(Traits::kWideStages == 3 && 2 * Traits::kWideBytes == sizeof(float4[16][128]));
  return *reinterpret_cast<float4(*)[16][128]>(shared.wide[1][1]);
}

// By all warps of a warpgroup, 16 columns each. (Without branches on the thread; see UniformZero.)
template <typename Traits>
class Fp8DraftBlock {
 public:
  using Shared = typename Traits::Shared;

  // Needs nothing that a launch ahead writes.
  __device__ __forceinline__ Fp8DraftBlock(const AttentionArgs& args, const WorkItem& item,
                                           Shared& shared)
      : args_(args),
        shared_(shared),
        kv_head_(item.kv_head),
        lane_(OpaqueLane()),
        thread_(static_cast<int>(threadIdx.x) / 32 % 4 * 32 + lane_) {
    const auto keys_of = [&](int column) {
      column = min(column, item.column_count - 1);  // (nobody looks at what is beyond)
      return args.block.keys[item.row_begin + RowOfColumn(args, item, column)];
    };
    int begin = INT_MAX;
    int end = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = FirstColumn() + 8 * i;
      pairs_[i] = static_cast<int>(OutputIndex(args, item, min(column, item.column_count - 1)));
      keys_[i] = keys_of(column);
      const RowKeys any = keys_of(lane_ + 32 * i);
      begin = min(begin, any.begin < any.end ? any.begin : INT_MAX);
      end = max(end, any.begin < any.end ? any.end : 0);
    }
    begin_ = __reduce_min_sync(0xffffffffu, begin);
    end_ = __reduce_max_sync(0xffffffffu, end);
    if (end_ == 0) begin_ = 0;
  }

  // Asks L2 for the first tokens.
  __device__ __forceinline__ void Prefetch() const {
    const int token = max(0, min(begin_ + lane_, end_ - 1));
    const size_t half = thread_ / 32 % 2 * (Traits::kHeadDim / 2);
    const auto* const k = static_cast<const uint16_t*>(args_.block.k);
    const auto* const v = static_cast<const uint16_t*>(args_.block.v);
    PrefetchToL2((thread_ / 64 == 0 ? k : v) + Element(token) + half);
  }

  // The launches ahead have ended, and the warpgroups that compute have done with V.
  __device__ __forceinline__ void Run() {
    float reference[2] = {kNoReference, kNoReference};
    float sum[2] = {};
    Sync();  // all that was here has been read
#pragma unroll 1
    for (int token = begin_; token < end_; token += kDraftTokens) {
      const bool first = token == begin_;
      const int at = (token - begin_) % kTokensAtOnce;
      uint4 q[kSteps][2];
      LoadQueries(q);
      if (at == 0) {
        if (!first) Sync();
        CopyTokens(token);
        WaitForCopies();
        Sync();
      }
      float s[2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 k[2] = {Key(at, step), Key(at + 8, step)};
        AddDraftProducts<DType::kBf16>(q[step], k, s);
      }
      float largest[2], of_tile[2];
      WeighDraftTile(args_.sm_scale, /*soft_cap=*/0.0f, keys_, token, s, largest, of_tile);
      float kept[2], added[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(reference[r], largest[r]);
        kept[r] = Exp2(reference[r] - raised);
        added[r] = Exp2(largest[r] - raised);
        reference[r] = raised;
        sum[r] = sum[r] * kept[r] + of_tile[r] * added[r];
      }
      uint32_t p[4];
      PackDraftWeights<DType::kBf16>(s, p);
      AddValues(at, first, p, kept, added);
    }
    if (begin_ == end_) Clear();
    Publish(sum, reference);
  }

 private:
  static constexpr int kSteps = Traits::kHeadDim / 32;
  static constexpr int kTokensAtOnce = 2 * kDraftTokens;
  static constexpr int kRowBytes = 2 * Traits::kHeadDim;
  static constexpr int kRowChunks = kRowBytes / 16;
  static_assert(2 * kTokensAtOnce * kRowBytes <= Traits::kWideBytes);

  __device__ __forceinline__ int FirstColumn() const {
    return thread_ / 32 * kDraftColumns + lane_ / 4;
  }
  __device__ __forceinline__ size_t Element(int token) const {
    return (size_t(token) * args_.kv_heads + kv_head_) * Traits::kHeadDim;
  }
  __device__ __forceinline__ void Sync() const { asm volatile("bar.sync 11, 128;" ::: "memory"); }

  // Where 16 bytes of a token are: neighbouring tokens' keys are read from different banks, and the
  // values of eight.
  __device__ __forceinline__ std::byte* Place(bool values, int token, int chunk) const {
    const int swizzle = token % 2 * 4 + token / 2 % 4;
    return shared_.wide[0][2] + ((values ? kTokensAtOnce : 0) + token) * kRowBytes +
           (chunk ^ swizzle) * 16;
  }
  __device__ __forceinline__ uint4 Key(int token, int step) const {
    return *reinterpret_cast<const uint4*>(Place(false, token + lane_ / 4, step * 4 + lane_ % 4));
  }

  __device__ __forceinline__ void LoadQueries(uint4 (&q)[kSteps][2]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q[step][i] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args_.q) +
                                                     size_t(pairs_[i]) * Traits::kHeadDim +
                                                     step * 32 + lane_ % 4 * 8);
      }
    }
  }

  // Begins to bring kTokensAtOnce tokens; zeros beyond the last.
  __device__ __forceinline__ void CopyTokens(int first) const {
    const int chunk = thread_ % kRowChunks;
#pragma unroll 1
    for (int i = thread_ / kRowChunks; i < kTokensAtOnce; i += 128 / kRowChunks) {
      const bool alive = first + i < end_;
      const size_t from = Element(alive ? first + i : first) + chunk * 8;
      CopyAsync16OrZero(Place(false, i, chunk), static_cast<const uint16_t*>(args_.block.k) + from,
                        alive);
      CopyAsync16OrZero(Place(true, i, chunk), static_cast<const uint16_t*>(args_.block.v) + from,
                        alive);
    }
  }

  __device__ __forceinline__ void AddValues(int at, bool first, const uint32_t (&p)[4],
                                            const float (&kept)[2], const float (&added)[2]) {
    float4(&o)[16][128] = DraftOutput<Traits>(shared_);
#pragma unroll 2
    for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
      uint32_t v[4];  // of 16 tokens: eight dimensions, and the next eight
      LoadMatricesTransposed(SharedAddress(Place(true, at + lane_ % 16, 2 * i + lane_ / 16)), v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[4] = {};
        Mma16x8x16<DType::kBf16>(x, p, v[2 * half], v[2 * half + 1]);
        float4& to = o[2 * i + half][thread_];
        float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!first) before = to;
        to =
            make_float4(before.x * kept[0] + x[0] * added[0], before.y * kept[0] + x[1] * added[0],
                        before.z * kept[1] + x[2] * added[1], before.w * kept[1] + x[3] * added[1]);
      }
    }
  }
  __device__ __forceinline__ void Clear() {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      DraftOutput<Traits>(shared_)[i][thread_] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // (What the columns' quads have is the same in their four lanes.)
  __device__ __forceinline__ void Publish(const float (&sum)[2], const float (&reference)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shared_.draft.sum[FirstColumn() + 8 * r] = sum[r];
      shared_.draft.reference[FirstColumn() + 8 * r] = reference[r];
    }
    __syncwarp();
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int kv_head_;
  const int lane_;
  const int thread_;  // of the warpgroup
  int begin_, end_;   // the tokens that some row sees
  int pairs_[2];      // of this thread's columns, in Q
  RowKeys keys_[2];
};

// The same for an item.
template <typename Traits, typename Widener>
__device__ __forceinline__ void AttendDraftBlock(const AttentionArgs& args, const WorkItem& item,
                                                 typename Traits::Shared& shared,
                                                 const Widener& widener) {
  Fp8DraftBlock<Traits> block(args, item, shared);
  block.Prefetch();
  WaitForLaunchesAhead();
  widener.WaitForEmpty();
  block.Run();
}

}  // namespace tributary::cuda
