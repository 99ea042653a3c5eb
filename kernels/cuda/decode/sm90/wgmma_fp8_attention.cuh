// Attention of 64 columns at a time over a paged FP8 cache with head dim 128, on sm_90a.
//
// The products are turned around against wgmma_attention.cuh: columns are rows of operand A, tokens
// the columns of operand B, S = Q K^T and O += P V.
//
// K is multiplied as it lies in the cache. Operand A of that product is the queries, each cut into
// two e4m3 pieces whose sum is a bf16, in registers for as long as an item lasts. So K is neither
// read by a thread nor widened. (Of queries that may be rounded to e4m3 there is one piece.)
//
// P stays in registers: what a thread holds of S is what it needs of operand A of the second
// product. V has to be f16 for that, and a warpgroup of its own widens it, from shared memory to
// shared memory, in the order in which a row of S counts the tokens.
//
// The tensor cores keep some 13 bits of a sum of FP8 products. Tiles in which that could be seen,
// those with large logits, are multiplied once more, by mma.sync in f16 with fp32 sums.
//
// A draft's block is attended to beside its context (wgmma_fp8_block.cuh).
//
// A row of S belongs to four lanes. Maxima and sums are taken inside a warp, and none waits for
// another but at the ends of an item.
#pragma once

#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_queries.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_tiles.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_warpgroup.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// kDraft: takes drafts' blocks along. kQueryPieces: one, if queries are to be rounded to e4m3.
template <DType kKvType, bool kDraft, int kQueryPieces>
struct WgmmaFp8Traits {
  static constexpr DType kKv = kKvType;
  static constexpr bool kDraftBlock = kDraft;
  static constexpr int kHeadDim = 128;
  static constexpr int kColumns = 64;
  static constexpr int kPieces = kQueryPieces;
  static constexpr int kGroupBytes = kGroupTokens * kHeadDim;
  static constexpr int kPanelBytes = kGroupTokens * kKeyPanelBytes;  // of a group
  static constexpr int kPanels = kGroupBytes / kPanelBytes;
  static constexpr int kTileBytes = kTileGroups * kGroupBytes;
  // Groups of V lie this far apart in shared memory, so that lanes which read different groups read
  // different banks.
  static constexpr int kValueGroupStride = kGroupBytes + 16;
  static constexpr int kWideBytes = 2 * kTileBytes;       // a tile of V in f16
  static constexpr int kWarpgroups = kComputeWarpgroups;  // rings of their own
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kBlockThreads = kThreads + 2 * 128;
  static constexpr int kKeyStages = 4;
  static constexpr int kValueStages = 2;
  static constexpr int kWideStages = 3;
  static constexpr float kBias = kWeightBias;
  // Sums of FP8 products keep some 13 bits, so that a logit is off by 2^-13 of itself: a logit (in
  // base 2) above this is multiplied once more in f16, unless it is so far below its reference that
  // its weight is nothing.
  static constexpr float kLargeLogit = 16.0f;
  static constexpr float kNegligible = 24.0f;
  // Finding a draft's block takes more of the warps that widen: one spilt register there costs
  // a trip to L2.
  static constexpr int kRegisters = kDraft ? 192 : 208;
  static constexpr int kWideningRegisters = kDraft ? 96 : 64;
  static constexpr int kCopyingRegisters = 32;
  static_assert(kRegisters * kThreads + (kWideningRegisters + kCopyingRegisters) * 128 <= 65536);
  // What a warpgroup's rows of the output get from the other blocks of a cluster, in vectors: four
  // for each of four lanes, of 64 / size rows, from size - 1 blocks.
  static constexpr int kInboxVectors = 16 * kColumns / kMaxClusterSize * (kMaxClusterSize - 1);

  struct Shared {
    union {
      alignas(1024) std::byte keys[kWarpgroups][kKeyStages][kTileBytes];
      // After a block's last item, the parts of a cut job, a column to a warp.
      ColumnMerger<kColumns>::Collected collected[kThreads / 32];
    };
    // V in f16; before an item's, its queries, and after it, the halves of the output that a
    // warpgroup gives to the other.
    union {
      alignas(1024) std::byte wide[kWarpgroups][kWideStages][kWideBytes];
      struct {
        std::byte raw[kColumns * kHeadDim * 2];          // as they come
        std::byte q[kPieces][kColumns * kTileRowBytes];  // chunks as SwizzledChunk says
      };
    };
    alignas(128) std::byte values[kWarpgroups][kValueStages][kTileGroups * kValueGroupStride];
    alignas(16) float4 inbox[kWarpgroups][kInboxVectors];
    float block_lse2[kMaxClusterSize][kColumns];  // of the blocks of the cluster
    float reference[kWarpgroups][kColumns];
    float sum[kWarpgroups][kColumns];  // of weights
    ColumnState<kColumns> columns;
    WorkItem items[2];
    float v_scale;
    CopyBarrier keys_full[kWarpgroups][kKeyStages];
    CopyBarrier keys_empty[kWarpgroups][kKeyStages];
    CopyBarrier values_full[kWarpgroups][kValueStages];
    CopyBarrier values_empty[kWarpgroups][kValueStages];
    CopyBarrier wide_full[kWarpgroups][kWideStages];
    CopyBarrier wide_empty[kWarpgroups][kWideStages];
    CopyBarrier queries_loaded;  // one arrival a thread that computes
    CopyBarrier queries_here;    // likewise: as they come, for a draft's block
    CopyBarrier draft_found;     // one arrival a thread that widens; a phase a DraftTile
    CopyBarrier draft_taken;     // one arrival a thread that has taken it
    int draft_steps;             // of kDraftTokens tokens, of the block last found
    InboxBarrier published;
    ClusterBarrier read;
    MergeNotes merge_notes;
  };
  static constexpr int kSharedBytes = 227 * 1024;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, 1)
    WgmmaFp8AttentionKernel(const __grid_constant__ AttentionArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared_bytes[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(shared_bytes + UniformZero());
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const ClusterPlace place = ThisCluster();
  const bool of_cluster = place.size > 1;

  const int index = static_cast<int>(place.cluster);
  CopyItem(args, index, &shared.items[0]);
  LetNextLaunchBegin();
  if (warpgroup == 3) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kCopyingRegisters));
    Fp8Copier<Traits> copier(args, place, shared, warp);
    int4 item = __ldg(reinterpret_cast<const int4*>(args.items + index));
    int next = __ldg(&args.items[index].next);
    copier.InitBarriers(place);
    ArriveAtBlock<Traits::kBlockThreads>();
    ArriveAtClusterRelaxed(place);
    int pages = copier.FirstPages(item);
    copier.Prefetch(item, pages);
    WaitForLaunchesAhead();
    for (;;) {
      copier.CopyItem(item, pages);
      if (next < 0) return;
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
  ArriveAtClusterRelaxed(place);
  if (shared.items[0].column_count == 0) return;
  if (warpgroup == 2) {
    WaitForCluster(place);
    ValueWidener<Traits> widener(place, shared, warp);
    DraftPhases draft;
    uint32_t parity = 0;
    for (int at = index; at >= 0; at = __ldg(&args.items[at].next)) {
      if constexpr (Traits::kDraftBlock) {
        // (The first is at hand.)
        const WorkItem& item = at == index ? shared.items[0] : args.items[at];
        if (HasDraftBlock(args, item, place)) {
          FindDraftBlock<Traits>(args, item, shared, widener, draft);
        }
      }
      const int4 item = __ldg(reinterpret_cast<const int4*>(args.items + at));
      if (!HasTiles(item.z, item.w, place)) continue;
      shared.queries_loaded.Wait(parity);
      parity ^= 1;
      widener.WidenItem(item, {__ldg(&args.items[at].key_begin), __ldg(&args.items[at].key_end)},
                        draft);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kRegisters));

  Fp8Warpgroup<Traits> state(args, shared, warpgroup);
  const TileTurns turns(place, warpgroup);
  PieceStager<Traits> queries;
  queries.Locate(args, shared.items[0]);
  // (A draft's block is waited for. Otherwise it is quicker to wait for the queries alone.)
  if (Traits::kDraftBlock && HasDraftBlock(args, shared.items[0], place)) queries.Prefetch();
  WaitForLaunchesAhead();
  queries.Ask(shared);
  WaitForCluster(place);
  const auto column_of = [&](int i) { return ColumnOfOwner(i, place); };
  for (int item_parity = 0;; item_parity ^= 1) {
    const WorkItem& item = shared.items[item_parity];
    const WorkItem& next = shared.items[item_parity ^ 1];
    if (threadIdx.x == 0) {
      shared.v_scale = ValueScale(args, item);
      Fp8Warpgroup<Traits>::ExpectOfCluster(shared, place);
      if (item.partial_count > 1) CutJob(args, item, place).Begin();
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
    if (HasTiles(item.group_begin, item.group_end, place)) {
      state.AddTiles(item, item.group_begin + turns.first, turns.apart, adds_draft);
    } else if (adds_draft) {
      state.AddDraftBlock();
    }
    WaitForCopies();
    // (Looked at when it is here, after what comes now.)
    uint64_t job_state = 0;
    if (!has_next && item.partial_count > 1) job_state = CutJob(args, item, place).State();
    state.Combine();
    if (place.size == 1) {
      state.Store(item);
    } else if (place.size == 2) {
      state.template MergeAndStore<2>(item, place, item_parity);
    } else if (place.size == 4) {
      state.template MergeAndStore<4>(item, place, item_parity);
    } else {
      state.template MergeAndStore<8>(item, place, item_parity);
    }
    if (!has_next) {
      if (item.partial_count > 1) {
        // (Keys have all been multiplied.)
        MergeTogether<Traits::kColumns, Traits::kThreads>(
            args, item, place, CutJob(args, item, place).AllBegun(job_state), shared.merge_notes,
            shared.collected, column_of);
      }
      return;
    }
    if (item.partial_count > 1) {
      MergeIfLastToCome<Traits::kColumns, Traits::kThreads>(args, item, place, shared.merge_notes,
                                                            column_of);
    }
    // The output gives way to queries. (A cluster's barrier would do alone, but behind this one the
    // compiler takes a warp's lanes to be together; otherwise it spills.)
    SyncThreads<Traits::kThreads>();
    if (of_cluster) {
      shared.read.Arrive(place, item_parity);
      shared.read.Wait(item_parity);
    }
    queries.Locate(args, next);
    queries.Ask(shared);
  }
#endif
}

}  // namespace tributary::cuda
