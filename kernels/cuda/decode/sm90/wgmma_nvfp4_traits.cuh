// The shapes of wgmma_fp8_attention.cuh over a cache of NVFP4, where K is widened as V is, and
// queries are f16.
#pragma once

#include <cstddef>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// Members are those of WgmmaFp8Traits, or say what they are.
template <bool kDraft>
struct WgmmaNvfp4Traits {
  static constexpr DType kKv = DType::kNvfp4;
  static constexpr bool kDraftBlock = kDraft;
  static constexpr int kHeadDim = 128;
  static constexpr int kTileRows = 64;
  static constexpr int kPieces = 2;  // halves of a query's dimensions
  static constexpr int kStripBytes = Nvfp4StripBytes(kHeadDim);
  static constexpr int kStripStride = kStripBytes + 16;  // of K and V as they come
  static constexpr int kValueStripStride = kStripStride;
  static constexpr int kWideBytes = 2 * 64 * kHeadDim;  // a tile of K or of V in f16
  static constexpr int kWarpgroups = kComputeWarpgroups;
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kBlockThreads = kThreads + 2 * 128;
  static constexpr int kKeyStages = 2;  // of widened K
  static constexpr int kRawKeyStages = 3;
  static constexpr int kValueStages = 3;
  static constexpr int kWideStages = 2;
  static constexpr int kTilesAtOnce = 1;
  static constexpr float kBias = kWeightBias;
  static constexpr int kRegisters = kDraft ? 176 : 192;
  static constexpr int kWideningRegisters = kDraft ? 96 : 64;
  static constexpr int kCopyingRegisters = 64;  // of the warps that copy, and widen K
  static_assert(kRegisters * kThreads + (kWideningRegisters + kCopyingRegisters) * 128 <= 65536);
  static constexpr int kInboxVectors =
      4 * LaneVectors(kHeadDim) * kTileRows / kMaxClusterSize * (kMaxClusterSize - 1);

  struct Shared {
    // K in f16: 64 rows of the first 64 dimensions, then of the others.
    union {
      alignas(1024) std::byte keys[kWarpgroups][kKeyStages][kWideBytes];
      RowMerger<kTileRows, kHeadDim>::Collected collected[kThreads / 32];
    };
    union {
      alignas(1024) std::byte wide[kWarpgroups][kWideStages][kWideBytes];
      struct {
        std::byte raw[kTileRows * kHeadDim * 2];
        std::byte q[kPieces][kTileRows * kTileRowBytes];
      };
    };
    alignas(128) std::byte raw_keys[kWarpgroups][kRawKeyStages][kTileStrips * kStripStride];
    alignas(128) std::byte values[kWarpgroups][kValueStages][kTileStrips * kStripStride];
    alignas(16) std::byte draft_keys[kDraft ? DraftTile<kHeadDim>::kTokens * 2 * kHeadDim : 16];
    alignas(16) float4 inbox[kWarpgroups][kInboxVectors];
    float block_lse2[kMaxClusterSize][kTileRows];
    float reference[kWarpgroups][kTileRows];
    float sum[kWarpgroups][kTileRows];
    PackedRowState<kTileRows> packed_rows;
    WorkItem items[2];
    float v_scale;
    CopyBarrier raw_keys_full[kWarpgroups][kRawKeyStages];
    CopyBarrier raw_keys_empty[kWarpgroups][kRawKeyStages];
    CopyBarrier keys_full[kWarpgroups][kKeyStages];
    CopyBarrier keys_empty[kWarpgroups][kKeyStages];
    CopyBarrier values_full[kWarpgroups][kValueStages];
    CopyBarrier values_empty[kWarpgroups][kValueStages];
    CopyBarrier wide_full[kWarpgroups][kWideStages];
    CopyBarrier wide_empty[kWarpgroups][kWideStages];
    CopyBarrier queries_loaded;
    CopyBarrier queries_here;
    CopyBarrier draft_found;
    CopyBarrier draft_taken;
    int draft_steps;
    int values_hidden[kWarpgroups];
    InboxBarrier published;
    ClusterBarrier read;
    MergeNotes merge_notes;
  };
  static constexpr int kSharedBytes = 227 * 1024;
};

}  // namespace tributary::cuda
