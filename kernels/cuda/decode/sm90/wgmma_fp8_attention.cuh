// Attention of 64 packed rows at a time over a paged FP8 cache with head dim 64 or 128, on sm_90a.
//
// The products are turned around against wgmma_attention.cuh: packed rows are the rows of operand
// A, slots the columns of operand B, S = Q K^T and O += P V.
//
// K is multiplied as it lies in the cache: no thread reads or widens it. The queries are operand A
// of that product. Each query is cut into two e4m3 pieces whose sum is a bf16, and the pieces stay
// in registers for as long as an item lasts. Queries that may be rounded to e4m3 have one piece.
//
// P stays in registers: what a thread holds of S is what it needs of operand A of the second
// product. V has to be f16 for that. A warpgroup of its own widens V, from shared memory to shared
// memory, in the order in which a row of S counts the slots.
//
// The tensor cores keep some 13 bits of a sum of FP8 products. KV tiles in which that could be
// seen, those with large logits, are multiplied once more, by mma.sync in f16 with fp32 sums.
//
// A draft block is attended to beside its context (wgmma_fp8_block.cuh).
//
// Over a cache of NVFP4 (WgmmaNvfp4Traits) K is widened, too, by the warps that copy, the queries
// are f16, and no KV tile is multiplied twice.
//
// A row of S belongs to four lanes. Maxima and sums are taken inside a warp, and a computing warp
// waits for another one only at the ends of an item.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_hidden.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_output.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_queries.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_softmax.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_tiles.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_traits.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_warpgroup.cuh"
#include "kernels/cuda/decode/sm90/wgmma_nvfp4_tiles.cuh"
#include "kernels/cuda/decode/sm90/wgmma_nvfp4_traits.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// Writes what the block, or its cluster, found of an item.
template <typename Traits>
__device__ __forceinline__ void StoreItem(const WorkItem& item, const ClusterPlace& place,
                                          const Fp8Warpgroup<Traits>& state, uint32_t parity) {
  if (place.size == 1) {
    state.Store(item);
  } else if (place.size == 2) {
    state.template MergeAndStore<2>(item, place, parity);
  } else if (place.size == 4) {
    state.template MergeAndStore<4>(item, place, parity);
  } else {
    state.template MergeAndStore<8>(item, place, parity);
  }
}

// What the threads that compute do with the block's items.
template <typename Traits>
__device__ __forceinline__ void ComputeItems(const AttentionArgs& args, const ClusterPlace& place,
                                             typename Traits::Shared& shared, int warpgroup) {
  Fp8Warpgroup<Traits> state(args, shared, warpgroup);
  const bool of_cluster = place.size > 1;
  const TileTurns turns(place, warpgroup);
  PieceStager<Traits> queries;
  queries.Locate(args, shared.items[0]);
  // Queries are asked of L2 early only where a draft block waits for them: otherwise waiting for
  // the queries alone is quicker.
  if (Traits::kDraftBlock && HasDraftBlock(args, shared.items[0], place)) queries.Prefetch();
  WaitForLaunchesAhead();
  queries.Ask(shared);
  WaitForCluster(place);
  const auto packed_row_of = [&](int i) { return PackedRowOfOwner(i, place); };
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const WorkItem& next = shared.items[item_parity ^ 1];
    if (threadIdx.x == 0) {
      shared.v_scale = ValueScale<Traits::kKv>(args, item);
      shared.values_hidden[0] = shared.values_hidden[1] = 0;
      Fp8Warpgroup<Traits>::ExpectOfCluster(shared, place);
      if (item.split_count > 1) CutJob(args, item, place).Begin();
    }
    state.Begin();
    WaitForCopies();
    const bool has_draft = Traits::kDraftBlock && HasDraftBlock(args, item, place);
    if (has_draft) shared.queries_here.Arrive();
    queries.Finish(shared);
    SyncThreads<Traits::kThreads>();
    const bool has_next = item.next >= 0;
    if (has_next) CopyItem(args, item.next, &shared.items[item_parity ^ 1]);
    const bool adds_draft = warpgroup == 0 && has_draft;
    if (HasTiles(item.strip_begin, item.strip_end, place)) {
      state.AddTiles(item, item.strip_begin + turns.first, turns.apart, adds_draft);
    } else if (adds_draft) {
      state.AddDraftBlock(item);
    }
    WaitForCopies();
    // The state is looked at further below, when it has come.
    uint64_t job_state = 0;
    if (!has_next && item.split_count > 1) job_state = CutJob(args, item, place).State();
    state.Combine();
    StoreItem<Traits>(item, place, state, item_parity);
    if (!has_next) {
      if (item.split_count > 1) {
        // All keys have been multiplied, so `collected` may take their place.
        MergeTogether<Traits::kTileRows, Traits::kHeadDim, Traits::kThreads>(
            args, item, place, CutJob(args, item, place).AllBegun(job_state), shared.merge_notes,
            shared.collected, packed_row_of);
      }
      return;
    }
    if (item.split_count > 1) {
      MergeIfLastToCome<Traits::kTileRows, Traits::kHeadDim, Traits::kThreads>(
          args, item, place, shared.merge_notes, packed_row_of);
    }
    // The next queries take the output's place. The cluster's barrier alone would do, but behind
    // this one the compiler takes a warp's lanes to be together; without it, it spills.
    SyncThreads<Traits::kThreads>();
    if (of_cluster) {
      shared.read.Arrive(place, item_parity);
      shared.read.Wait(item_parity);
    }
    queries.Locate(args, next);
    queries.Ask(shared);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaFp8AttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes + UniformZero());
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const ClusterPlace place = ThisCluster();

  const int index = static_cast<int>(place.cluster);
  CopyItem(args, index, &shared.items[0]);
  if (args.beside != Beside::kNextLaunch) LetNextLaunchBegin();
  if (warpgroup == 3) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kCopyingRegisters));
    Fp8Copier<Traits> copier(args, place, shared, warp);
    int4 item = __ldg(reinterpret_cast<const int4*>(args.items + index));
    int next = __ldg(&args.items[index].next);
    copier.InitBarriers(place);
    ArriveAtBlock<Traits::kBlockThreads>();
    ArriveAtCluster(place);
    int pages = copier.FirstPages(item);
    copier.Prefetch(item, pages);
    WaitForLaunchesAhead();
    if (args.beside == Beside::kNextLaunch) LetNextLaunchBegin();
    KeyWidener<Traits> keys(shared, warp);
    for (;;) {
      copier.CopyItem(item, pages, [&](int copied) { keys.Follow(copied); });
      if (next < 0) {
        keys.Finish();
        return;
      }
      item = __ldg(reinterpret_cast<const int4*>(args.items + next));
      pages = copier.FirstPages(item);
      next = __ldg(&args.items[next].next);
    }
  }
  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kWideningRegisters));
  }
  WaitForCopies();
  SyncBlock<Traits::kBlockThreads>();
  ArriveAtCluster(place);
  if (shared.items[0].packed_count == 0) return;
  if (warpgroup == 2) {
    WaitForCluster(place);
    std::conditional_t<OfNvfp4<Traits>, Nvfp4ValueWidener<Traits>, ValueWidener<Traits>> widener(
        place, shared, warp);
    DraftPhases draft;
    uint32_t parity = 0;
    for (int at = index; at >= 0; at = __ldg(&args.items[at].next)) {
      if constexpr (Traits::kDraftBlock) {
        // The first item is in shared memory already.
        const WorkItem& item = at == index ? shared.items[0] : args.items[at];
        if (HasDraftBlock(args, item, place)) {
          FindDraftBlock<Traits>(args, item, shared, widener, draft);
        }
      }
      const int4 item = __ldg(reinterpret_cast<const int4*>(args.items + at));
      if (!HasTiles(item.z, item.w, place)) continue;
      shared.queries_loaded.Wait(parity);
      parity ^= 1;
      widener.WidenItem(item,
                        {__ldg(&args.items[at].key_begin), __ldg(&args.items[at].key_end),
                         __ldg(&args.items[at].dense_begin), __ldg(&args.items[at].dense_end)},
                        draft);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kRegisters));

  ComputeItems<Traits>(args, place, shared, warpgroup);
#endif
}

}  // namespace tributary::cuda
