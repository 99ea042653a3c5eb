// Attention of many packed rows (16 to 64: verified drafts, DFlash blocks) over a paged cache, on
// sm_90a.
//
// The same products as in mma_attention.cuh, S^T = K Q^T and O^T += V^T P^T, by warpgroups of four
// warps and 64 tokens. Four more warps keep rings of such tiles of K and V filled with bulk copies.
// They are operand A, which is read from shared memory into registers, each byte by one thread: so
// FP8 is widened once, in registers. Operand B is the queries, which stay in shared memory, and the
// weights P, which the four warps of a warpgroup exchange through it. (Loads straight into
// registers, as in mma_attention.cuh, lose here: the fence that publishes P waits for every load in
// flight.)
//
// A warp that multiplies does little else: an operand in registers keeps it until the tensor cores
// have taken it. So it is other warpgroups, at other tiles or other packed rows, that make use of
// the time.
//
// Weights are taken against a reference that follows the maximum only when it is exceeded by 2^8:
// until then nothing needs to be reduced between threads, and the barrier that publishes P also
// says whether it holds.
#pragma once

#include "kernels/cuda/decode/cluster_merge.cuh"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_copy.cuh"
#include "kernels/cuda/decode/sm90/wgmma_merge.cuh"
#include "kernels/cuda/decode/sm90/wgmma_queries.cuh"
#include "kernels/cuda/decode/sm90/wgmma_traits.cuh"
#include "kernels/cuda/decode/sm90/wgmma_warpgroup.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// By one thread that computes: readies what the block waits at beside its rings.
template <typename Traits>
__device__ __forceinline__ void InitBarriers(const ClusterPlace& place,
                                             typename Traits::Shared& shared) {
  for (int i = 0; i < Traits::kWarpgroups; ++i) {
    shared.weights_published[i].Init(128);
    shared.exceeded[i][0] = shared.exceeded[i][1] = 0;
  }
  shared.queries_staged.Init(Traits::kThreads);
  shared.met.Init(Traits::kThreads);
  shared.published.Init(place.size, Traits::kThreads);
  shared.read.Init(place.size, Traits::kThreads);
  FenceBarrierInit();
}

// Brings what the block found of an item to the blocks of its cluster, and merges its share of the
// packed rows. The cluster has more than one block.
template <typename Traits, typename Meet>
__device__ __forceinline__ void StoreOfCluster(const AttentionArgs& args, const WorkItem& item,
                                               const ClusterPlace& place,
                                               const Warpgroup<Traits>& state,
                                               typename Traits::Shared& shared, int item_parity,
                                               Meet meet) {
  meet();  // the halves give way to o
  ForEachOutput(state, [&](int packed_row, int d, float2 x) {
    *reinterpret_cast<float2*>(&shared.o[packed_row][d]) = x;
  });
  shared.published.Arrive(place, item_parity);
  shared.published.Wait(item_parity);
  MergeCluster<Traits::kValueDim, Traits::kTileRows, Traits::kThreads>(
      place, shared.o, shared.lse2, [&](int packed_row, int d, const PackedRowPart& part) {
        const int row = shared.target[packed_row];
        if (row < 0) return;
        const bool whole = item.split_count == 1;
        float* const to = whole ? args.o : args.partial_o;
        StoreRelaxed(to + size_t(row) * Traits::kValueDim + d, part.o);
        if (d == 0) StoreLse(args, {row, whole}, part.lse2);
      });
}

// Writes what the block found of an item. The block is a cluster of its own.
template <typename Traits>
__device__ __forceinline__ void StoreOfBlock(const AttentionArgs& args, const WorkItem& item,
                                             const Warpgroup<Traits>& state,
                                             typename Traits::Shared& shared) {
  float* const to = item.split_count == 1 ? args.o : args.partial_o;
  ForEachOutput(state, [&](int packed_row, int d, float2 x) {
    const int row = shared.target[packed_row];
    if (row < 0) return;
    StoreRelaxed(to + size_t(row) * Traits::kValueDim + d, x);
  });
}

// What the threads that compute do with the block's items. The first item and the barriers are
// ready.
template <typename Traits>
__device__ __forceinline__ void ComputeItems(const AttentionArgs& args, const ClusterPlace& place,
                                             typename Traits::Shared& shared, int warpgroup) {
  const bool of_cluster = place.size > 1;
  uint32_t met_parity = 0;
  const auto meet = [&] { shared.met.Meet(met_parity); };
  const TileTurns turns(place, warpgroup);
  Warpgroup<Traits> state(args, shared, warpgroup);
  typename Traits::Queries queries;

  queries.Prefetch(args, shared.items[0]);
  WaitForLaunchesAhead();
  queries.Ask(args, shared.items[0], shared.raw, shared.packed_rows);
  WaitForCluster(place);
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const WorkItem& next = shared.items[item_parity ^ 1];
    StageQueries<Traits>(args, item, queries, shared, static_cast<uint32_t>(item_parity));
    const bool has_next = item.next >= 0;
    if (has_next) CopyItem(args, item.next, &shared.items[item_parity ^ 1]);
    AddTiles(state, item, item.strip_begin + turns.first, turns.apart);
    WaitForCopies();
    Combine(state, item, of_cluster, meet);
    if (of_cluster) {
      StoreOfCluster<Traits>(args, item, place, state, shared, item_parity, meet);
      if (has_next) shared.read.Arrive(place, item_parity);
    } else {
      StoreOfBlock<Traits>(args, item, state, shared);
    }
    if (item.split_count > 1) {
      MergeIfLast<Traits::kValueDim, Traits::kTileRows, Traits::kThreads>(args, item, place,
                                                                          &shared.is_last, meet);
    }
    if (!has_next) break;
    // The output gives way to queries.
    if (of_cluster) {
      shared.read.Wait(item_parity);
    } else {
      meet();
    }
    // For the compiler: behind a named barrier it takes a warp's lanes to be together, and the
    // loop's addresses stay in uniform registers.
    SyncThreads<Traits::kThreads>();
    queries.Ask(args, next, shared.raw, shared.packed_rows);
  }
  // No block ends while others may read its shared memory.
  ArriveAtCluster(place);
  WaitForCluster(place);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaAttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes + UniformZero());
  // (The shuffle tells the compiler that all lanes agree.)
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const ClusterPlace place = ThisCluster();

  // Until the launches ahead have ended, what this one will read is asked for.
  if (args.beside != Beside::kNextLaunch) LetNextLaunchBegin();
  const int index = static_cast<int>(place.cluster);
  const bool copies = warpgroup == Traits::kThreads / 128;  // or else computes
  // K or V of a ring to each of the four warps that copy.
  static_assert(2 * Traits::kWarpgroups == 4);
  TileCopier<Traits> copier(args, place, shared, __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0));
  int4 copied_item = {};  // page_table, kv_head, strip_begin, strip_end
  int next_copied = -1;
  if (copies) {
    copied_item = __ldg(reinterpret_cast<const int4*>(args.items + index));
    next_copied = __ldg(&args.items[index].next);
    copier.InitBarriers();
    FenceBarrierInit();
    copier.Prefetch(copied_item);
  } else {
    CopyItem(args, index, &shared.items[0]);
    if (threadIdx.x == 128) InitBarriers<Traits>(place, shared);
    WaitForCopies();
  }
  __syncthreads();
  ArriveAtCluster(place);  // (that the barriers are ready has been published)
  if (shared.items[0].packed_count == 0) {
    // Where no block has an item, what comes after this launch still comes after those ahead of it.
    WaitForLaunchesAhead();
    return;
  }

  if (copies) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kCopyingRegisters));
    WaitForLaunchesAhead();
    if (args.beside == Beside::kNextLaunch) LetNextLaunchBegin();
    for (;;) {
      copier.CopyItem(copied_item);
      if (next_copied < 0) return;
      copied_item = __ldg(reinterpret_cast<const int4*>(args.items + next_copied));
      next_copied = __ldg(&args.items[next_copied].next);
    }
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kRegisters));
  ComputeItems<Traits>(args, place, shared, warpgroup);
#endif
}

}  // namespace tributary::cuda
