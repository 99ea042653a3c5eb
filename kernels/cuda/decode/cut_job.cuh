// What the blocks know of each other that have pieces of one job; the last to come merges them.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// A cut job's state, one word for each rank of a cluster: pieces in the workspace, pieces begun,
// blocks that wait for the others, and those of them that have seen all pieces there. Zero before
// and after every launch. By one thread of a block, unless said.
class CutJob {
 public:
  __device__ CutJob(const AttentionArgs& args, const WorkItem& item, const ClusterPlace& place)
      : word_(args.arrivals + item.arrivals + place.rank),
        piece_(item.partial_index),
        pieces_(item.partial_count) {}

  // When the launches ahead have ended and this block has begun its piece.
  __device__ void Begin() const {
    if (pieces_ <= kMostPieces) AddRelaxed(word_, kBegun);
  }
  __device__ uint64_t State() const { return LoadRelaxed(word_); }
  // Whether a block may wait that saw this state.
  __device__ bool AllBegun(uint64_t state) const { return Count(state, kBegun) == pieces_; }

  // When the piece is in the workspace. Releases what the block wrote (a barrier of its threads
  // makes that cumulative) and acquires what the others did. Returns the state with it.
  __device__ uint64_t Arrive(bool waits) const {
    const uint64_t added = waits ? Arrival() + kWaiting : Arrival();
    const uint64_t state = AddAcquireRelease(word_, added) + added;
    if (AllArrived(state) && Count(state, kWaiting) == 0) *word_ = 0;
    return state;
  }

  // What a block that waits looks at, by any thread of it. Acquires what those wrote that have
  // come.
  __device__ uint64_t Look() const { return LoadAcquire(word_); }
  __device__ bool AllArrived(uint64_t state) const {
    const auto arrived = static_cast<uint32_t>(state);
    return arrived == (masked() ? ~0u >> (32 - pieces_) : static_cast<uint32_t>(pieces_));
  }
  // Those of the first 32 pieces that have come, when that is known before all have.
  __device__ uint32_t Arrived(uint64_t state) const {
    return masked() ? static_cast<uint32_t>(state) : 0;
  }
  // How many blocks waited of a job whose pieces have all arrived.
  __device__ int Waited(uint64_t state) const { return Count(state, kWaiting); }
  // By a block that waited, when none of its threads looks any more.
  __device__ void Leave(int waited) const {
    if (Count(AddRelaxedAndFetch(word_, kLeft), kLeft) + 1 == waited) *word_ = 0;
  }

 private:
  // Up to 32 pieces have a bit each, more are counted. Of a job of more pieces than blocks run at
  // once, none waits.
  static constexpr uint64_t kBegun = uint64_t{1} << 32;
  static constexpr uint64_t kWaiting = uint64_t{1} << 42;
  static constexpr uint64_t kLeft = uint64_t{1} << 52;
  static constexpr int kMostPieces = (1 << 10) - 1;

  __device__ bool masked() const { return pieces_ <= 32; }
  __device__ uint64_t Arrival() const { return masked() ? uint64_t{1} << piece_ : 1; }
  static __device__ int Count(uint64_t state, uint64_t unit) {
    return static_cast<int>(state / unit) & kMostPieces;
  }

  uint64_t* word_;
  int piece_;
  int pieces_;
};

// Merges columns column_of(begin) to column_of(end - 1) of an item. By all threads, each four
// dimensions.
template <int kValueDim, int kColumns, int kThreads, typename ColumnOf>
__device__ __forceinline__ void MergeColumns(const AttentionArgs& args, const WorkItem& item,
                                             int begin, int end, ColumnOf column_of) {
  constexpr int kUnits = kValueDim / 4;       // of a column
  constexpr int kAtOnce = kThreads / kUnits;  // columns; threads beyond these have none
  constexpr bool kAllThreads = kThreads % kUnits == 0;
  const int d = threadIdx.x % kUnits * 4;
  const float* const lse2 = args.partial_lse + size_t(item.partial_begin) * kColumns;
  const float* const o = args.partial_o + size_t(item.partial_begin) * kColumns * kValueDim + d;
#pragma unroll 1
  for (int i = begin + threadIdx.x / kUnits; i < end; i += kAtOnce) {
    if (!kAllThreads && threadIdx.x >= kAtOnce * kUnits) break;
    const int column = column_of(i);
    if (column >= item.column_count) continue;
    ColumnPart merged[1];
    MergeParts<1, 8>(
        item.partial_count, [&](int, int p) { return __ldcg(lse2 + p * kColumns + column); },
        [&](int, int p) {
          const size_t row = size_t(p) * kColumns + column;
          return __ldcg(reinterpret_cast<const float4*>(o + row * kValueDim));
        },
        merged);
    StoreResult(args, OutputIndex(args, item, column), kValueDim, d, merged[0].o, merged[0].lse2);
  }
}

// Called by all threads after a piece of a cut job is in the workspace, each block of a cluster
// having written its columns, of which it has equally many one after the other: the last to come
// merges them. meet(): the threads' barrier.
template <int kValueDim, int kColumns, int kThreads, typename Meet>
__device__ __forceinline__ void MergeIfLast(const AttentionArgs& args, const WorkItem& item,
                                            const ClusterPlace& place, int* is_last /* shared */,
                                            Meet meet) {
  meet();
  if (threadIdx.x == 0) {
    const CutJob job(args, item, place);
    *is_last = job.AllArrived(job.Arrive(/*waits=*/false));
  }
  meet();
  if (*is_last == 0) return;
  const int columns = kColumns / static_cast<int>(place.size);
  const int begin = static_cast<int>(place.rank) * columns;
  MergeColumns<kValueDim, kColumns, kThreads>(
      args, item, begin, min(begin + columns, item.column_count), [](int i) { return i; });
}

}  // namespace tributary::cuda
