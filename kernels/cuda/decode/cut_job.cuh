// What the thread blocks that hold splits of one job know of each other. The last one to finish
// merges the splits.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// The state of a job that was split, one word for each rank of a cluster: the splits whose result
// is in the workspace, the splits begun, the thread blocks that wait for the others, and those of
// them that have seen all results. It is zero before and after every launch. One thread of a thread
// block calls these functions, unless they say otherwise.
class CutJob {
 public:
  __device__ CutJob(const AttentionArgs& args, const WorkItem& item, const ClusterPlace& place)
      : word_(args.arrivals + item.arrivals + place.rank),
        split_(item.split_index),
        splits_(item.split_count) {}

  // Called when the launches ahead have ended and this thread block has begun its split.
  __device__ void Begin() const {
    if (splits_ <= kMostSplits) AddRelaxed(word_, kBegun);
  }
  __device__ uint64_t State() const { return LoadRelaxed(word_); }
  // Whether a thread block that saw this state may wait for the others.
  __device__ bool AllBegun(uint64_t state) const { return Count(state, kBegun) == splits_; }

  // Called when the split's result is in the workspace. Releases what the thread block wrote (a
  // barrier of its threads makes that cumulative) and acquires what the others wrote. Returns the
  // state that includes this arrival.
  __device__ uint64_t Arrive(bool waits) const {
    const uint64_t added = waits ? Arrival() + kWaiting : Arrival();
    const uint64_t state = AddAcquireRelease(word_, added) + added;
    if (AllArrived(state) && Count(state, kWaiting) == 0) *word_ = 0;
    return state;
  }

  // The state, as a waiting thread block polls it; any of its threads may call this. Acquires the
  // results of the splits that have arrived.
  __device__ uint64_t Look() const { return LoadAcquire(word_); }
  __device__ bool AllArrived(uint64_t state) const {
    const auto arrived = static_cast<uint32_t>(state);
    return arrived == (masked() ? ~0u >> (32 - splits_) : static_cast<uint32_t>(splits_));
  }
  // One bit for each of the first 32 splits that has arrived, if the job has no more than these.
  __device__ uint32_t Arrived(uint64_t state) const {
    return masked() ? static_cast<uint32_t>(state) : 0;
  }
  // How many thread blocks wait, in a state in which all splits have arrived.
  __device__ int Waited(uint64_t state) const { return Count(state, kWaiting); }
  // Called by a thread block that waited, when none of its threads polls any more.
  __device__ void Leave(int waited) const {
    if (Count(AddRelaxedAndFetch(word_, kLeft), kLeft) + 1 == waited) *word_ = 0;
  }

 private:
  // Up to 32 splits have one bit each; more are counted. If a job has more splits than thread
  // blocks run at once, none waits.
  static constexpr uint64_t kBegun = uint64_t{1} << 32;
  static constexpr uint64_t kWaiting = uint64_t{1} << 42;
  static constexpr uint64_t kLeft = uint64_t{1} << 52;
  static constexpr int kMostSplits = (1 << 10) - 1;

  __device__ bool masked() const { return splits_ <= 32; }
  __device__ uint64_t Arrival() const { return masked() ? uint64_t{1} << split_ : 1; }
  static __device__ int Count(uint64_t state, uint64_t unit) {
    return static_cast<int>(state / unit) & kMostSplits;
  }

  uint64_t* word_;
  int split_;
  int splits_;
};

// Merges packed rows packed_row_of(begin) to packed_row_of(end - 1) of an item. All threads call
// it; each takes four dimensions at a time.
template <int kValueDim, int kTileRows, int kThreads, typename PackedRowOf>
__device__ __forceinline__ void MergePackedRows(const AttentionArgs& args, const WorkItem& item,
                                                int begin, int end, PackedRowOf packed_row_of) {
  constexpr int kUnits = kValueDim / 4;       // of a packed row
  constexpr int kAtOnce = kThreads / kUnits;  // packed rows; threads beyond these have none
  constexpr bool kAllThreads = kThreads % kUnits == 0;
  const int d = threadIdx.x % kUnits * 4;
  const float* const lse2 = args.partial_lse + size_t(item.partial_begin) * kTileRows;
  const float* const o = args.partial_o + size_t(item.partial_begin) * kTileRows * kValueDim + d;
#pragma unroll 1
  for (int i = begin + threadIdx.x / kUnits; i < end; i += kAtOnce) {
    if (!kAllThreads && threadIdx.x >= kAtOnce * kUnits) break;
    const int packed_row = packed_row_of(i);
    if (packed_row >= item.packed_count) continue;
    PackedRowPart merged[1];
    MergeParts<1, 8>(
        item.split_count, [&](int, int p) { return __ldcg(lse2 + p * kTileRows + packed_row); },
        [&](int, int p) {
          const size_t row = size_t(p) * kTileRows + packed_row;
          return __ldcg(reinterpret_cast<const float4*>(o + row * kValueDim));
        },
        merged);
    StoreResult(args, OutputIndex(args, item, packed_row), kValueDim, d, merged[0].o,
                merged[0].lse2);
  }
}

// Called by all threads after their split of a job is in the workspace. The thread blocks of a
// cluster have equally many packed rows each, one block's behind another's; each arrives at a word
// of its own, and the last to arrive there merges these rows. meet(): the barrier of the threads.
template <int kValueDim, int kTileRows, int kThreads, typename Meet>
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
  const int own = kTileRows / static_cast<int>(place.size);
  const int begin = static_cast<int>(place.rank) * own;
  MergePackedRows<kValueDim, kTileRows, kThreads>(
      args, item, begin, min(begin + own, item.packed_count), [](int i) { return i; });
}

}  // namespace tributary::cuda
