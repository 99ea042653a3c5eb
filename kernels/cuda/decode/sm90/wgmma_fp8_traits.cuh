// The shapes of wgmma_fp8_attention.cuh: which tiles a thread block takes, by how many threads,
// with how many registers, and what lies in its shared memory.
#pragma once

#include <cstddef>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// kDraft: takes drafts' blocks along. kQueryPieces: one, if queries are to be rounded to e4m3.
template <DType kKvType, bool kDraft, int kQueryPieces>
struct WgmmaFp8Traits {
  static constexpr DType kKv = kKvType;
  static constexpr bool kDraftBlock = kDraft;
  static constexpr int kHeadDim = 128;
  static constexpr int kColumns = 64;
  static constexpr int kPieces = kQueryPieces;
  static constexpr int kGroupBytes = kStripSlots * kHeadDim;
  static constexpr int kPanelBytes = kStripSlots * kKeyPanelBytes;  // of a group
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
    PackedRowState<kColumns> columns;
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

}  // namespace tributary::cuda
