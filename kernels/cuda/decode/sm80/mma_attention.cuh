// Attention of few packed rows (query tiles of 8 or 16) over a paged cache, at the speed of memory,
// on sm_80 and later.
//
// Every warp works on its own. It reads one strip of 16 slots of K and V (two if keys are short)
// from global memory straight into the registers from which it multiplies, because page_layout.h
// stores them in that order, and it asks for its next strips as soon as the registers are free.
// Warps share nothing until an item ends, so nothing waits and there is no pipeline to fill: a
// thousand tokens cost little more than the latency of memory.
//
// The order of the contraction index is free as long as both operands agree, so each thread's
// operand of K is 16 consecutive bytes of a slot, and its operand of V is four consecutive slots.
#pragma once

#include "base/mailbox/gate.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/decode/sm80/mma_output.cuh"
#include "kernels/cuda/decode/sm80/mma_products.cuh"
#include "kernels/cuda/decode/sm80/mma_strips.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// Puts dimensions [8 * vector, 8 * vector + 8) of a packed row's query where the lanes will take
// them.
template <typename Traits>
requires(!OfNvfp4<Traits>) __device__ __forceinline__
    void StageQuery(typename Traits::Shared& shared, int packed_row, int vector, uint4 x) {
  auto& q = shared.q[packed_row / 8];
  const int first_lane = packed_row % 8 * 4;
  constexpr int kPanelVectors = Traits::kFullSteps * 4;  // of the full panels
  if constexpr (Traits::kHasTail) {
    const int in_tail = vector - kPanelVectors;
    if (in_tail >= 0) {
      uint4* to = &q[Traits::kFullSteps][first_lane];
      if constexpr (Traits::kElementBytes == 1) {
        to[in_tail] = x;  // a lane's two quads
      } else {            // a lane has one quad, in the first of the step's products
        to[2 * in_tail] = make_uint4(x.x, x.y, 0, 0);
        to[2 * in_tail + 1] = make_uint4(x.z, x.w, 0, 0);
      }
      return;
    }
  }
  // A lane's vector of K starts at dimension kElements * (4 * panel + lane % 4).
  constexpr int kOfVector = Traits::kStepsPerPanel;  // steps with one vector of K
  const int of_lane = vector / kOfVector;
  const int step = of_lane / 4 * kOfVector + vector % kOfVector;
  q[step][first_lane + of_lane % 4] = x;
}

template <OfNvfp4 Traits>
__device__ __forceinline__ void StageQuery(typename Traits::Shared& shared, int packed_row,
                                           int vector, uint4 x) {
  auto& q = shared.q[packed_row / 8];
  const int first_lane = packed_row % 8 * 4;
  const int d = vector * 8;
  const KeyPiece piece = KeyPieceOf(d, Traits::kKeyDim);
  if (Traits::kSteps > Traits::kFullSteps && piece.dims == kNvfp4Block) {
    // Two lanes' dimensions, in the step's first product.
    uint4* to = &q[Traits::kFullSteps][first_lane + (d - piece.first) / 4];
    to[0] = make_uint4(x.x, x.y, 0, 0);
    to[1] = make_uint4(x.z, x.w, 0, 0);
    return;
  }
  const int of_lane = piece.dims / 4;  // dimensions
  const int in_piece = d - piece.first;
  q[piece.first / 32 + in_piece % of_lane / 8][first_lane + in_piece / of_lane] = x;
}

// Attends to a warp's strips of an item. What the warp asks for behind them are its first strips of
// the next item, which begins with `next_item`.
template <typename Traits>
__device__ __forceinline__ void AttendItem(const AttentionArgs& args, const WorkItem& item,
                                           const int4& next_item, int warp, int warps,
                                           const typename Traits::Shared& shared,
                                           StripLoader<Traits>& strips, Accumulator<Traits>& acc) {
  const int lane = threadIdx.x % 32;
  const bool has_next = item.next >= 0;
  float scale[Traits::kRowTiles][2];
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      scale[tile][c] = shared.packed_rows.scale[tile * 8 + lane % 4 * 2 + c];
    }
  }
  acc.Reset();
  const int begin = item.strip_begin + warp;
  bool in_item = begin < item.strip_end;
  // A warp that has nothing here has not asked for its part of the next item yet.
  if (!in_item && has_next) {
    strips.next.Start(next_item);
    strips.AskForBoth();
  }
  for (int strip = begin; in_item; strip += Traits::kStrips * warps) {
    // What to ask for when the registers are free: this item's next strips or the next item's
    // first.
    strips.next.Advance();
    in_item = !strips.next.Done();
    if (!in_item && has_next) strips.next.Start(next_item);
    const bool more = !strips.next.Done();
    float s[Traits::kStrips][Traits::kRowTiles][4];
    Scores<Traits>(strips.tokens.k, shared, s);
    if (more) strips.AskForKeys();
    ScaleScores<Traits>(args, scale, s);
    const int last = strip + (Traits::kStrips - 1) * warps;
    // Whether the item has all of these strips, and every packed row sees all of them.
    const bool dense = strip * kStripSlots >= item.dense_begin &&
                       (last + 1) * kStripSlots <= item.dense_end &&
                       (Traits::kStrips == 1 || last < item.strip_end);
    if (!dense) {
#pragma unroll
      for (int i = 0; i < Traits::kStrips; ++i) {
        MaskScores<Traits>(item, shared.packed_rows, strip + i * warps, s[i]);
      }
    }
    acc.Weigh(s);
    if (!dense) {
#pragma unroll
      for (int i = 0; i < Traits::kStrips; ++i) {
        const int of_strip = strip + i * warps;
        ClearDeadValues<Traits>(item, of_strip, strips.tokens.v[i]);
        if (RowsDiffer(item) && AnyNonFinite<Traits>(strips.tokens.v[i])) {
          acc.ConfineValues(shared.packed_rows, of_strip, strips.tokens.v[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Traits::kStrips; ++i) acc.AddValues(strips.tokens.v[i], s[i]);
    if (more) strips.AskForValues();
  }
}

// Brings an item to shared memory, in two halves.
template <typename Traits>
class ItemCopier {
 public:
  __device__ __forceinline__ void Begin(const AttentionArgs& args, int index, WorkItem* to) {
    CopyItem(args, index, to);
  }
  __device__ __forceinline__ void End(WorkItem*) const {}  // WaitForCopies does that
};
// Brings a warp's first strips.
template <typename Traits>
__device__ __forceinline__ void AskForFirst(StripLoader<Traits>& strips) {
  strips.AskForBoth();
}

// Which of the ways that strips come a kernel takes.
template <typename Traits>
struct StripsOf {
  using Type = StripLoader<Traits>;
};
template <typename Traits>
using Strips = typename StripsOf<Traits>::Type;

// The last that a thread does.
__device__ __forceinline__ void EndBeside(const AttentionArgs& args) {
  if (args.beside == Beside::kLastLaunch) WaitForLaunchesAhead();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerMultiprocessor)
    MmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes);
  const ClusterPlace place = ThisCluster();
  const int warp = place.rank * Traits::kWarps + threadIdx.x / 32;  // of the cluster
  const int warps = place.size * Traits::kWarps;
  Strips<Traits> strips(args, warp, warps, shared);
  ItemCopier<Traits> item_copier;
  QueryStager<Traits::kKv, Traits::kKeyDim, Traits::kStagedDims, Traits::kTileRows,
              Traits::kThreads>
      queries;

  if (place.size > 1) {
    if (threadIdx.x == 0) shared.inbox.Init();
    ArriveAtCluster(place);  // (that the barrier is ready has been published)
  }

  // Until the launches ahead have ended, this one asks L2 for what it will read. If they are known
  // to write no more than the end of a sequence, it also reads.
  if (args.beside != Beside::kNextLaunch) LetNextLaunchBegin();
  const int index = static_cast<int>(place.cluster);
  const WorkItem first = args.items[index];
  item_copier.Begin(args, index, &shared.items[0]);
  strips.next.Start(*reinterpret_cast<const int4*>(&first));
  if (args.passage.counter == nullptr) {
    strips.Prefetch();
    queries.Prefetch(args, first);
  } else {
    // The launch is here before a session's layer has arrived. What it reads early would hold up
    // the host's copy, and is not asked for twice once the gate has been passed.
    if (threadIdx.x == 0) mailbox::AwaitPassage(args.passage);
    SyncThreads<Traits::kThreads>();
  }
  // (Beside the last launch all others ahead have ended.)
  const bool waits = args.beside != Beside::kLastLaunch;
  if (waits && (args.late_strips == 0 || first.packed_count == 0)) WaitForLaunchesAhead();
  if (args.beside == Beside::kNextLaunch) LetNextLaunchBegin();
  if (first.packed_count == 0) return EndBeside(args);
  AskForFirst<Traits>(strips);
  queries.Load(args, first);
  item_copier.End(&shared.items[0]);
  if constexpr (!Traits::kRings) WaitForCopies();
  for (int parity = 0;; parity ^= 1) {
    queries.Finish(args, shared.packed_rows, [&](int packed_row, int vector, uint4 x) {
      StageQuery<Traits>(shared, packed_row, vector, x);
    });
    SyncThreads<Traits::kThreads>();
    const WorkItem& item = shared.items[parity];
    const bool has_next = item.next >= 0;
    int4 next_item = {};
    if (has_next) {
      next_item = __ldg(reinterpret_cast<const int4*>(args.items + item.next));
      item_copier.Begin(args, item.next, &shared.items[parity ^ 1]);
    }
    Accumulator<Traits> acc;
    AttendItem<Traits>(args, item, next_item, warp, warps, shared, strips, acc);
    if (has_next) item_copier.End(&shared.items[parity ^ 1]);
    StoreItem<Traits>(args, item, place, acc, shared, [&] {
      if constexpr (Traits::kRegistersAreScarce) {
        if (has_next) queries.Prefetch(args, shared.items[parity ^ 1]);
      } else {
        if (has_next) queries.Load(args, shared.items[parity ^ 1]);
      }
    });
    MergeItem<Traits>(args, item, place, parity, shared);
    if (!has_next) return EndBeside(args);
    if constexpr (Traits::kRegistersAreScarce) queries.Load(args, shared.items[parity ^ 1]);
  }
}

}  // namespace tributary::cuda
