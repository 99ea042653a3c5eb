// What the blocks do together that have pieces of one job: merge them.
//
// Blocks that end with their piece wait for the others, and each takes a share of the merge. That
// cannot stand still: a block waits only when all pieces have been begun, by blocks that run and
// wait for nothing but blocks that run as well. When one of them does not wait, as it has further
// items or found a piece not begun, the last to arrive merges all. Who merges what changes nothing
// in the result: parts are added in the order of the pieces.
#pragma once

#include <cstdint>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/ptx.cuh"

namespace tributary::cuda {

// A block's share of the merge: the index-th of `count`. None when that is 0.
struct MergeShare {
  int index = 0;
  int count = 0;
  int waited = 0;  // the blocks that waited, when this is one of them
};

// A cut job's state, one word for each rank of a cluster: pieces in the workspace, pieces begun,
// blocks that wait, and those of them that have seen all pieces there. Zero before and after every
// launch. By one thread of a block.
class CutJob {
 public:
  __device__ CutJob(const AttentionArgs& args, const WorkItem& item, const ClusterPlace& place)
      : word_(args.arrivals + item.arrivals + place.rank), pieces_(item.partial_count) {}

  // When the launches ahead have ended and this block has begun its piece.
  __device__ void Begin() const {
    if (pieces_ <= kMostPieces) AddRelaxed(word_, kBegun);
  }
  __device__ uint64_t State() const { return LoadRelaxed(word_); }
  // Whether a block may wait that saw this state.
  __device__ bool AllBegun(uint64_t state) const { return Count(state, kBegun) == pieces_; }

  // When the piece is in the workspace. Releases what the block wrote (a barrier of its threads
  // makes that cumulative) and acquires what the others did.
  __device__ MergeShare Arrive(bool waits) const {
    const uint64_t added = waits ? kArrived + kWaiting : kArrived;
    uint64_t state = AddAcquireRelease(word_, added) + added;
    const int order = Arrived(state) - 1;
    const bool last = order + 1 == pieces_;
    if (!waits) {
      if (last && Count(state, kWaiting) == 0) *word_ = 0;
      return {0, last ? 1 : 0, 0};
    }
    while (Arrived(state) < pieces_) state = LoadAcquire(word_);
    const int waited = Count(state, kWaiting);
    if (waited == pieces_) return {order, pieces_, waited};
    return {0, last ? 1 : 0, waited};
  }
  // After an Arrive that waited.
  __device__ void Leave(int waited) const {
    if (Count(AddAcquireRelease(word_, kLeft), kLeft) + 1 == waited) *word_ = 0;
  }

 private:
  // Pieces are counted to 2^32. Of a job of more pieces than blocks run at once, none waits.
  static constexpr uint64_t kArrived = 1;
  static constexpr uint64_t kBegun = uint64_t{1} << 32;
  static constexpr uint64_t kWaiting = uint64_t{1} << 42;
  static constexpr uint64_t kLeft = uint64_t{1} << 52;
  static constexpr int kMostPieces = (1 << 10) - 1;

  static __device__ int Arrived(uint64_t state) {
    return static_cast<int>(static_cast<uint32_t>(state));
  }
  static __device__ int Count(uint64_t state, uint64_t unit) {
    return static_cast<int>(state / unit) & kMostPieces;
  }

  uint64_t* word_;
  int pieces_;
};

// Merges columns column_of(begin) to column_of(end - 1) of an item. By all threads, each four
// dimensions.
template <int kHeadDim, int kColumns, int kThreads, typename ColumnOf>
__device__ __forceinline__ void MergeColumns(const AttentionArgs& args, const WorkItem& item,
                                             int begin, int end, ColumnOf column_of) {
  constexpr int kUnits = kHeadDim / 4;  // of a column
  static_assert(kThreads % kUnits == 0);
  const int d = threadIdx.x % kUnits * 4;
  const float* const lse2 = args.partial_lse + size_t(item.partial_begin) * kColumns;
  const float* const o = args.partial_o + size_t(item.partial_begin) * kColumns * kHeadDim + d;
#pragma unroll 1
  for (int i = begin + threadIdx.x / kUnits; i < end; i += kThreads / kUnits) {
    const int column = column_of(i);
    if (column >= item.column_count) continue;
    ColumnPart merged[1];
    MergeParts<1, 8>(
        item.partial_count, [&](int, int p) { return __ldcg(lse2 + p * kColumns + column); },
        [&](int, int p) {
          const size_t row = size_t(p) * kColumns + column;
          return __ldcg(reinterpret_cast<const float4*>(o + row * kHeadDim));
        },
        merged);
    StoreResult(args, OutputIndex(args, item, column), kHeadDim, d, merged[0].o, merged[0].lse2);
  }
}

// Called by all threads after a piece of a cut job is in the workspace, each block of a cluster
// having written its columns, of which it has equally many one after the other: the last to come
// merges them.
template <int kHeadDim, int kColumns, int kThreads>
__device__ __forceinline__ void MergeIfLast(const AttentionArgs& args, const WorkItem& item,
                                            const ClusterPlace& place, int* is_last /* shared */) {
  SyncThreads<kThreads>();
  if (threadIdx.x == 0) *is_last = CutJob(args, item, place).Arrive(/*waits=*/false).count;
  SyncThreads<kThreads>();
  if (*is_last == 0) return;
  const int columns = kColumns / static_cast<int>(place.size);
  const int begin = static_cast<int>(place.rank) * columns;
  MergeColumns<kHeadDim, kColumns, kThreads>(
      args, item, begin, min(begin + columns, item.column_count), [](int i) { return i; });
}

// The same of pieces whose blocks may wait for each other; `waits`: of thread 0, whether this one
// may. A block has written columns column_of(0), column_of(1) and so on.
template <int kHeadDim, int kColumns, int kThreads, typename ColumnOf>
__device__ __forceinline__ void MergeTogether(const AttentionArgs& args, const WorkItem& item,
                                              const ClusterPlace& place, bool waits,
                                              MergeShare* shared_share, ColumnOf column_of) {
  const CutJob job(args, item, place);
  SyncThreads<kThreads>();
  if (threadIdx.x == 0) *shared_share = job.Arrive(waits);
  SyncThreads<kThreads>();
  const MergeShare share = *shared_share;
  if (share.waited > 0 && threadIdx.x == kThreads - 1) job.Leave(share.waited);
  if (share.count == 0) return;
  const int columns = kColumns / static_cast<int>(place.size);
  MergeColumns<kHeadDim, kColumns, kThreads>(args, item, columns * share.index / share.count,
                                             columns * (share.index + 1) / share.count, column_of);
}

}  // namespace tributary::cuda
