// The shapes of wgmma_fp8_attention.cuh: which tiles a thread block takes, by how many threads,
// with how many registers, and what lies in its shared memory.
#pragma once

#include <cstddef>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// kDim: 64 or 128. kDraft: whether draft blocks are taken along. kQueryPieces: 1 if queries are
// rounded to e4m3, else 2.
template <DType kKvType, int kDim, bool kDraft, int kQueryPieces>
struct WgmmaFp8Traits {
  static constexpr DType kKv = kKvType;
  static constexpr bool kDraftBlock = kDraft;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileRows = 64;
  static constexpr int kPieces = kQueryPieces;
  static constexpr int kStripBytes = kStripSlots * kHeadDim;
  static constexpr int kPanelBytes = kStripSlots * kKeyPanelBytes;  // of a strip
  static constexpr int kPanels = kStripBytes / kPanelBytes;
  static constexpr int kTileBytes = kTileStrips * kStripBytes;
  // Bytes from one strip of V to the next in shared memory. Lanes that read different strips then
  // read different banks.
  static constexpr int kValueStripStride = kStripBytes + 16;
  static constexpr int kWideBytes = 2 * kTileBytes;       // a tile of V in f16
  static constexpr int kWarpgroups = kComputeWarpgroups;  // each with rings of its own
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kBlockThreads = kThreads + 2 * 128;
  // (As many bytes whatever the head dim.)
  static constexpr int kKeyStages = 512 / kHeadDim;
  static constexpr int kValueStages = 256 / kHeadDim;
  static constexpr int kWideStages = kHeadDim == 64 ? 4 : 3;
  // Tiles whose weights a warpgroup finds together, if its registers hold them: what it waits for
  // in between, it then waits for half as often.
  static constexpr int kTilesAtOnce = kHeadDim == 64 ? 2 : 1;
  static constexpr float kBias = kWeightBias;
  // Sums of FP8 products keep some 13 bits, so a logit is off by 2^-13 of itself. A logit (in base
  // 2) above kLargeLogit is computed once more in f16, unless it is so far below its reference
  // (kNegligible) that its weight does not count.
  static constexpr float kLargeLogit = 16.0f;
  static constexpr float kNegligible = 24.0f;
  // The warps that widen need more registers when they also compute the logits of draft blocks: a
  // spilt register there costs a trip to L2.
  static constexpr int kRegisters = kDraft ? 192 : 208;
  static constexpr int kWideningRegisters = kDraft ? 96 : 64;
  static constexpr int kCopyingRegisters = 32;
  static_assert(kRegisters * kThreads + (kWideningRegisters + kCopyingRegisters) * 128 <= 65536);
  // What a warpgroup's rows of the output get from the other thread blocks of a cluster, in vectors
  // of four floats: as many as a lane has of a row, for each of four lanes, of 64 / size rows, from
  // size - 1 thread blocks.
  static constexpr int kInboxVectors =
      4 * LaneVectors(kHeadDim) * kTileRows / kMaxClusterSize * (kMaxClusterSize - 1);

  struct Shared {
    union {
      alignas(1024) std::byte keys[kWarpgroups][kKeyStages][kTileBytes];
      // After the thread block's last item: the partials of a job's splits, one packed row per
      // warp.
      RowMerger<kTileRows, kHeadDim>::Collected collected[kThreads / 32];
    };
    // V in f16. Before an item's tiles its queries lie here, and after them the halves of the
    // output that the warpgroups give to each other.
    union {
      alignas(1024) std::byte wide[kWarpgroups][kWideStages][kWideBytes];
      struct {
        std::byte raw[kTileRows * kHeadDim * 2];  // before they are cut
        // As PairsFurther says.
        std::byte q[(kPieces * kHeadDim + 127) / 128][kTileRows * kTileRowBytes];
      };
    };
    alignas(128) std::byte values[kWarpgroups][kValueStages][kTileStrips * kValueStripStride];
    alignas(16) float4 inbox[kWarpgroups][kInboxVectors];
    float block_lse2[kMaxClusterSize][kTileRows];  // of the thread blocks of the cluster
    float reference[kWarpgroups][kTileRows];
    float sum[kWarpgroups][kTileRows];  // of weights
    PackedRowState<kTileRows> packed_rows;
    WorkItem items[2];
    float v_scale;
    CopyBarrier keys_full[kWarpgroups][kKeyStages];
    CopyBarrier keys_empty[kWarpgroups][kKeyStages];
    CopyBarrier values_full[kWarpgroups][kValueStages];
    CopyBarrier values_empty[kWarpgroups][kValueStages];
    CopyBarrier wide_full[kWarpgroups][kWideStages];
    CopyBarrier wide_empty[kWarpgroups][kWideStages];
    CopyBarrier queries_loaded;  // one arrival per computing thread
    CopyBarrier queries_here;    // likewise: uncut queries, for a draft block
    CopyBarrier draft_found;     // one arrival per widening thread, one phase per DraftTile
    CopyBarrier draft_taken;     // one arrival per thread that has taken it
    // Steps of kDraftTokens tokens in the draft block found last, and kDraftRowsDiffer.
    int draft_steps;
    int values_hidden[kWarpgroups];  // whether values have been taken out of an item's tiles
    InboxBarrier published;
    ClusterBarrier read;
    MergeNotes merge_notes;
  };
  static constexpr int kSharedBytes = 227 * 1024;
};

}  // namespace tributary::cuda
