// The merge of a job's splits, for wgmma_fp8_attention.cuh.
//
// Thread blocks whose last item is a split of the job wait for each other, and each merges a share
// of the packed rows. This cannot deadlock: a thread block waits only when all splits have been
// begun, by thread blocks that run and wait for nothing but thread blocks that run as well. When
// one of them does not wait, because it has further items or found a split that was not begun, the
// last one to arrive merges all packed rows.
//
// A warp takes one packed row. It asks for a split's partial as soon as that is there, so that for
// the last one it waits for a single trip to L2, and not for the partials of all packed rows at
// once. The result does not depend on who merges or what came first: partials are added in the
// order of the splits.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// How many vectors of four dimensions a computing thread is left with of each of its packed rows,
// when a row's dimensions are shared out among the four lanes of each of two warpgroups.
constexpr int LaneVectors(int head_dim) { return head_dim / 32; }

// How the output of a split lies in the workspace: in the order of the accumulators of the threads
// that hold it. So whole sectors are stored, and whole sectors are loaded for the vectors (of four
// dimensions) of a packed row.
template <int kHeadDim>
struct PartialFragments {
  static constexpr int kFloats = 64 * kHeadDim;  // of a split
  static constexpr int kUnits = kHeadDim / 4;    // vectors of a packed row
  static constexpr int kVectors = LaneVectors(kHeadDim);

  // The place of vector v that computing thread `thread` has of its packed row r. The vector holds
  // dimensions 16 v, 16 v + 1, 16 v + 8 and 16 v + 9, counted from the thread's first.
  static __device__ __forceinline__ int Of(int thread, int r, int v) {
    return ((r * kVectors + v) * 256 + thread) * 4;
  }
  // The place of a packed row's vector `unit`, of kUnits.
  static __device__ __forceinline__ int OfPackedRow(int packed_row, int unit) {
    const int thread =
        unit / (kUnits / 2) * 128 + packed_row / 16 * 32 + packed_row % 8 * 4 + unit % 4;
    return Of(thread, packed_row / 8 % 2, unit / 4 % kVectors);
  }
  static __device__ __forceinline__ int FirstDimension(int unit) {
    return unit / 4 * 16 + unit % 4 * 2;
  }
};

// The largest value of the warp's lanes.
__device__ __forceinline__ float MaxOfWarp(float x) {
  // The values are compared as integers of the same order.
  int ordered = __float_as_int(x);
  ordered ^= ordered >> 31 & 0x7fffffff;
  ordered = __reduce_max_sync(0xffffffffu, ordered);
  return __int_as_float(ordered ^ (ordered >> 31 & 0x7fffffff));
}

// The sum of the partials of one packed row. A warp computes it, each lane for four dimensions.
class PartSum {
 public:
  // Lane i gives the LSE of partial i, in base 2, and the LSE of no keys beyond the last one.
  template <int kParts>
  __device__ __forceinline__ void Add(float lse2, const float4 (&o)[kParts]) {
    const float max = fmaxf(max_, MaxOfWarp(lse2));
    const float kept = Exp2(max_ - max);
    const float of_lane = Exp2(lse2 - max);
    max_ = max;
    sum_ *= kept;
    o_ = make_float4(o_.x * kept, o_.y * kept, o_.z * kept, o_.w * kept);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float weight = __shfl_sync(0xffffffffu, of_lane, i);
      sum_ += weight;
      AddScaled(o_, weight, o[i]);
    }
  }
  __device__ __forceinline__ PackedRowPart Result() const {
    const float inverse = sum_ == 0.0f ? 0.0f : __fdividef(1.0f, sum_);
    return {make_float4(o_.x * inverse, o_.y * inverse, o_.z * inverse, o_.w * inverse),
            sum_ == 0.0f ? EmptyLse<float>() : max_ + __log2f(sum_)};
  }

 private:
  float max_ = kNoReference;
  float sum_ = 0.0f;
  float4 o_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

// Merges one packed row. One warp uses it. With 64 dimensions the upper half of the warp does what
// the lower half does, but for storing.
template <int kTileRows, int kHeadDim>
class RowMerger {
  using Fragments = PartialFragments<kHeadDim>;

 public:
  // How many partials a warp keeps in shared memory.
  static constexpr int kAtOnce = 16;
  using Collected = float4[kAtOnce][32];

  RowMerger() = default;
  __device__ __forceinline__ RowMerger(const AttentionArgs& args, const WorkItem& item,
                                       int packed_row)
      : parts_(packed_row < item.packed_count ? item.split_count : 0) {
    const size_t split = static_cast<size_t>(item.partial_begin);
    from_lse2_ = args.partial_lse + split * kTileRows + packed_row;
    from_o_ =
        args.partial_o + split * Fragments::kFloats + Fragments::OfPackedRow(packed_row, Unit());
    const size_t at = OutputIndex(args, item, packed_row);
    to_o_ = args.o + at * kHeadDim + Fragments::FirstDimension(Unit());
    to_lse_ = args.lse + at;
  }

  // Finds where everything lies ahead of time, while the arrival is in flight.
  __device__ __forceinline__ void Locate() {
    asm volatile("" : "+l"(from_lse2_), "+l"(from_o_), "+l"(to_o_), "+l"(to_lse_));
  }

  // Waits until all partials are there, and begins to copy the first ones to shared memory as they
  // come, beginning with those that `state` shows. (Loads into registers would make the next look
  // at the state wait for them.) Returns the last state seen.
  __device__ __forceinline__ uint64_t Collect(const CutJob& job, uint64_t state,
                                              Collected& collected) {
    uint32_t wanted = (1u << min(parts_, kAtOnce)) - 1;
    lse2_ = EmptyLse<float>();
    for (;;) {
      const uint32_t come = job.Arrived(state) & wanted;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (come >> i & 1) {
          CopyAsync16(&collected[i][Lane()], from_o_ + i * Fragments::kFloats);
        }
      }
      if (come >> Lane() & 1) lse2_ = __ldcg(from_lse2_ + Lane() * kTileRows);
      wanted &= ~come;
      if (job.AllArrived(state)) {
        collected_ = wanted == 0;
        return state;
      }
      state = __shfl_sync(0xffffffffu, job.Look(), 0);
    }
  }
  // Adds up the partials, which are all there, and stores the result.
  __device__ __forceinline__ void Finish(const Collected& collected) {
    if (!collected_) return Finish();
    float4 o[kAtOnce];
    WaitForCopies();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      o[i] = i < parts_ ? collected[i][Lane()] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    PartSum sum;
    sum.Add(lse2_, o);
    AddParts(kAtOnce, sum);
    Store(sum.Result());
  }
  __device__ __forceinline__ void Finish() const {
    PartSum sum;
    AddParts(0, sum);
    Store(sum.Result());
  }

 private:
  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int Unit() { return Lane() % Fragments::kUnits; }

  __device__ __forceinline__ void AddParts(int begin, PartSum& sum) const {
#pragma unroll 1
    for (; begin < parts_; begin += kAtOnce) {
      float4 o[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = min(begin + i, parts_ - 1);
        o[i] = __ldcg(reinterpret_cast<const float4*>(from_o_ + part * Fragments::kFloats));
      }
      const int part = begin + Lane();
      const bool mine = Lane() < kAtOnce && part < parts_;
      sum.Add(mine ? __ldcg(from_lse2_ + part * kTileRows) : EmptyLse<float>(), o);
    }
  }
  __device__ __forceinline__ void Store(const PackedRowPart& merged) const {
    if (parts_ == 0 || Lane() >= Fragments::kUnits) return;
    StoreRelaxed(to_o_, make_float2(merged.o.x, merged.o.y));
    StoreRelaxed(to_o_ + 8, make_float2(merged.o.z, merged.o.w));
    if (Lane() == 0) StoreRelaxed(to_lse_, merged.lse2 * kLn2);
  }

  int parts_ = 0;  // 0: the item has no such packed row
  const float* from_lse2_ = nullptr;
  const float* from_o_ = nullptr;
  float* to_o_ = nullptr;
  float* to_lse_ = nullptr;
  bool collected_ = false;
  float lse2_ = 0.0f;  // of this lane's partial
};

// What the threads of a thread block tell each other.
struct MergeNotes {
  bool waits;        // whether this thread block waits for the others
  uint64_t arrived;  // the job's state when this thread block's split arrived
  uint64_t all;      // the job's state with all splits
};

// The first of `packed_rows` that fall to the index-th of `count` when they share them out evenly:
// packed_rows * index / count. (Exact: see QueryRowOf.)
__device__ __forceinline__ int ShareBegin(int packed_rows, int index, int count) {
  return static_cast<int>((static_cast<float>(packed_rows * index) + 0.5f) *
                          __fdividef(1.0f, static_cast<float>(count)));
}

// Merges all packed rows of this thread block's share of the cluster.
template <int kTileRows, int kHeadDim, int kThreads, typename PackedRowOf>
__device__ __forceinline__ void MergeAll(const AttentionArgs& args, const WorkItem& item,
                                         const ClusterPlace& place, PackedRowOf packed_row_of) {
  const int packed_rows = kTileRows >> place.SizeLog2();
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < packed_rows; i += kThreads / 32) {
    RowMerger<kTileRows, kHeadDim>(args, item, packed_row_of(i)).Finish();
  }
}

// Called by all computing threads after a split has been stored by a thread block that has further
// items: the last one to come merges all. A thread block of a cluster merges the packed rows
// column_of(0), column_of(1) and so on.
template <int kTileRows, int kHeadDim, int kThreads, typename PackedRowOf>
__device__ __forceinline__ void MergeIfLastToCome(const AttentionArgs& args, const WorkItem& item,
                                                  const ClusterPlace& place, MergeNotes& notes,
                                                  PackedRowOf packed_row_of) {
  SyncThreads<kThreads>();
  const CutJob job(args, item, place);
  if (threadIdx.x == 0) notes.arrived = job.Arrive(/*waits=*/false);
  SyncThreads<kThreads>();
  if (job.AllArrived(notes.arrived))
    MergeAll<kTileRows, kHeadDim, kThreads>(args, item, place, packed_row_of);
}

// The same after a thread block's last item. `waits` says, in the last warp, whether this thread
// block may wait. The notes, and what each warp collects, are in shared memory.
template <int kTileRows, int kHeadDim, int kThreads, typename PackedRowOf>
__device__ __forceinline__ void MergeTogether(
    const AttentionArgs& args, const WorkItem& item, const ClusterPlace& place, bool waits,
    MergeNotes& notes, typename RowMerger<kTileRows, kHeadDim>::Collected* collected,
    PackedRowOf packed_row_of) {
  constexpr int kMergers =
      kThreads / 32 - 1;  // warps; the last one speaks to the other thread blocks
  const CutJob job(args, item, place);
  const int packed_rows = kTileRows >> place.SizeLog2();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const bool speaks = threadIdx.x == kMergers * 32;
  int i = 0;
  int end = 0;
  RowMerger<kTileRows, kHeadDim> merger;
  SyncThreads<kThreads>();
  if (warp < kMergers) {
    i = ShareBegin(packed_rows, item.split_index, item.split_count) + warp;
    end = ShareBegin(packed_rows, item.split_index + 1, item.split_count);
    merger = RowMerger<kTileRows, kHeadDim>(args, item, packed_row_of(min(i, packed_rows - 1)));
    merger.Locate();
  } else if (speaks) {
    // This comes before any warp asks for partials, because the fence would wait for them.
    notes.waits = waits;
    notes.arrived = job.Arrive(waits);
  }
  SyncThreads<kThreads>();
  const uint64_t arrived = notes.arrived;
  if (notes.waits) {
    const bool merges = i < end;
    uint64_t state = arrived;
    if (merges) {
      state = merger.Collect(job, arrived, collected[warp]);
      ArriveAtBlock<kThreads, kPartsCollectedBarrier>();
    } else {
      if (warp == kMergers) {
        while (!job.AllArrived(state)) state = __shfl_sync(0xffffffffu, job.Look(), 0);
        if (speaks) notes.all = state;
      }
      SyncBlock<kThreads, kPartsCollectedBarrier>();
      state = notes.all;
    }
    const int waited = job.Waited(state);
    if (speaks) job.Leave(waited);
    if (waited == item.split_count) {
      if (!merges) return;
      merger.Finish(collected[warp]);
#pragma unroll 1
      for (i += kMergers; i < end; i += kMergers) {
        RowMerger<kTileRows, kHeadDim>(args, item, packed_row_of(i)).Finish();
      }
      return;
    }
  }
  if (job.AllArrived(arrived))
    MergeAll<kTileRows, kHeadDim, kThreads>(args, item, place, packed_row_of);
}

}  // namespace tributary::cuda
