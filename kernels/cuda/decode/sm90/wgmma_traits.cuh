// The shapes of wgmma_attention.cuh: which tiles a thread block takes, by how many threads, with
// how many registers, and what lies in its shared memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// The raw products of two neighbouring packed rows become exponents of weights: each product is
// multiplied by the scale, and the offset is added.
struct alignas(16) PackedRowPair {
  float scale[2];
  float offset[2];  // the bias less the reference
};

// What lies in a strip, and what a thread has of it, by type of cache and head dims. Of elements of
// whole bytes:
template <DType kKvType, int kKeyDimension, int kValueDimension>
struct WgmmaStrip {
  static constexpr int kElementBytes = int(SizeOf(kKvType));

  // K of a strip: panels of 64 bytes per slot, and a tail of 32 where these remain (page_layout.h).
  static constexpr int kKeyRowBytes = KeyStride(kKeyDimension, kElementBytes);
  static constexpr int kPanels = kKeyRowBytes / kKeyPanelBytes;
  static constexpr bool kHasTail = kKeyRowBytes % kKeyPanelBytes != 0;
  // Of four elements, of which a lane has so many in 16 bytes of a panel; as many steps of 16
  // dimensions has a panel, and half as many has the tail.
  static constexpr int kQuadsPerVector = kVectorBytes / (4 * kElementBytes);
  static constexpr int kTailSteps = kHasTail ? kQuadsPerVector / 2 : 0;
  static constexpr int kKeySteps = kPanels * kQuadsPerVector + kTailSteps;  // of K Q^T
  static constexpr int kStagedDims = 16 * kKeySteps;  // of a query: those of a key with its padding
  static_assert(kStagedDims * kElementBytes == kKeyRowBytes);

  // Words of V per thread, strip and tile of 64 dimensions: two dimensions of four slots.
  static constexpr int kValueWords = 2 * kElementBytes;

  static constexpr size_t kKeyStripBytes = size_t(kStripSlots) * kKeyRowBytes;
  static constexpr size_t kValueStripBytes = size_t(kStripSlots) * kValueDimension * kElementBytes;

  // The next tile's scores are multiplied right behind this tile's values, where registers allow
  // it: FP8 needs them for widening.
  static constexpr bool kTogether =
      kElementBytes == 2 && kKeyDimension <= 128 && kValueDimension <= 128;
};

// Of NVFP4 (nvfp4_layout.h). A word of V comes with a word of its tokens' scales.
template <int kKeyDimension, int kValueDimension>
struct WgmmaStrip<DType::kNvfp4, kKeyDimension, kValueDimension> {
  static constexpr int kStagedDims = kKeyDimension;
  static constexpr int kKeySteps = kKeyDimension / 16;
  static constexpr int kValueWords = 2;
  static constexpr size_t kKeyStripBytes = Nvfp4StripBytes(kKeyDimension);
  static constexpr size_t kValueStripBytes = Nvfp4StripBytes(kValueDimension);
  static constexpr bool kTogether = false;
};

template <DType kKvType, int kKeyDimension, int kValueDimension, int kTileRowCount>
struct WgmmaShape : WgmmaStrip<kKvType, kKeyDimension, kValueDimension> {
  using Strip = WgmmaStrip<kKvType, kKeyDimension, kValueDimension>;
  using Strip::kKeyStripBytes, Strip::kValueStripBytes, Strip::kStagedDims;
  static constexpr DType kKv = kKvType;
  static constexpr DType kCompute = ComputeType(kKv);
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kTileRows = kTileRowCount;

  // The thread block: warpgroups that compute, with a ring of tiles each, and one that copies and
  // gives its registers to those that compute.
  static constexpr int kWarpgroups = kComputeWarpgroups;
  static constexpr int kThreads = 128 * kWarpgroups;  // that compute
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlockThreads = kThreads + 128;

  // Registers of a computing and of a copying thread. There are no more than the block began with,
  // the same for all its threads: a warp that asks for more waits for ever.
  static constexpr int kRegisters = 240;
  static constexpr int kCopyingRegisters = 24;
  static constexpr int kRegistersAtBegin = 65536 / kBlockThreads / 8 * 8;
  static_assert(kRegisters * kThreads + kCopyingRegisters * (kBlockThreads - kThreads) <=
                kRegistersAtBegin * kBlockThreads);

  static constexpr int kQueryPanels = (kStagedDims + kTileSlots - 1) / kTileSlots;

  // V of 16 tokens. The second product takes tiles of 64 dimensions; what the last of them has
  // beyond kValueDim is computed from other dimensions and not stored.
  static constexpr int kDimTiles = (kValueDim + 63) / 64;
  static constexpr bool kDimsPadded = kValueDim % 64 != 0;
  static_assert(kValueDim % 16 == 0);
  // A place in a ring takes a tile of K or of V.
  static constexpr int kTileBytes = kTileStrips * int(std::max(kKeyStripBytes, kValueStripBytes));

  // Brings queries to shared memory.
  using Queries = QueryCopier<kKv, kKeyDim, kStagedDims, kTileRows, kThreads>;

  // Accumulators: S^T of 64 tokens, O^T of kDimTiles * 64 dimensions.
  static constexpr int kTiles = kTileRows / 8;  // of 8 packed rows
  static constexpr int kCells = kTileRows / 4;  // packed rows of a thread, two of each tile
  static_assert(kTileRows % 16 == 0);           // weights are stored two tiles at a time
  static constexpr float kBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;
  // The warpgroups' outputs are added up half by half: the dimensions' halves, or, where their
  // tiles cannot be halved, the packed rows'.
  static constexpr bool kDimsSplit = kDimTiles % 2 == 0;
  static constexpr int kOwnDimTiles = kDimsSplit ? kDimTiles / 2 : kDimTiles;
  static constexpr int kOwnTileRows = kDimsSplit ? kTileRows : kTileRows / 2;
  static constexpr int kOwnTiles = kOwnTileRows / 8;
  static constexpr int kOwnVectors = kOwnDimTiles * kOwnTiles;  // of four floats
  static_assert(2 * kOwnVectors == kDimTiles * kTiles);
};

// What a thread block's shared memory holds beside its rings.
template <typename Shape>
struct WgmmaFixedMemory {
  static constexpr int kWarpgroups = Shape::kWarpgroups;
  static constexpr int kTileRows = Shape::kTileRows;

  // A warpgroup's weights, and, when its last product is done, what it gives away.
  union Scratch {
    alignas(1024) std::byte p[2][kTileRows * kTileRowBytes];
    float4 half[Shape::kOwnVectors][128];  // of O
  };

  union {
    // Tiles of operand B; see wgmma.cuh.
    struct {
      alignas(1024) std::byte q[Shape::kQueryPanels][kTileRows * kTileRowBytes];
      union {
        Scratch scratch[kWarpgroups];
        std::byte raw[Shape::Queries::kRawBytes];  // queries as they come
      };
    };
    float o[kTileRows][Shape::kValueDim + 4];  // the thread block's, for its cluster
  };
  PackedRowPair pairs[kWarpgroups][kTileRows / 2];
  float reference[kWarpgroups][kTileRows];
  alignas(16) float factor[kWarpgroups][kTileRows];
  alignas(
      16) float2 factors[Shape::kWarps][kTileRows];  // by which the outputs enter the sum; a warp's
  float of_warps[Shape::kWarps][kTileRows];          // the warps' maxima, later their sums
  float lse2[kTileRows];                             // of the block, in base 2
  int target[kTileRows];  // the row of O or of the workspace, -1 for none
  PackedRowState<kTileRows> packed_rows;
  WorkItem items[2];
  float v_scale;
  CopyBarrier weights_published[kWarpgroups];  // one arrival per thread
  CopyBarrier queries_staged;    // one arrival per computing thread, one phase per item
  BlockBarrier met;              // by all that compute
  int exceeded[kWarpgroups][2];  // whether a logit outgrew the reference
  ClusterBarrier published;      // o, in all blocks of the cluster
  ClusterBarrier read;           // o, by all blocks of the cluster
  int is_last;
};

template <DType kKvType, int kKeyDimension, int kValueDimension, int kTileRowCount>
struct WgmmaTraits : WgmmaShape<kKvType, kKeyDimension, kValueDimension, kTileRowCount> {
  using Shape = WgmmaShape<kKvType, kKeyDimension, kValueDimension, kTileRowCount>;
  using Fixed = WgmmaFixedMemory<Shape>;
  using Stage = std::byte[Shape::kTileBytes];

  // One ring for each half of the tiles, with K and V in turn, in what the thread block's shared
  // memory has left.
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kTilesOfRings =
      (kSharedBytes - int(sizeof(Fixed)) - 1024) / Shape::kTileBytes;
  // Tiles of a ring that are on their way at once: what comes nearest to kBytesUnderWay.
  static constexpr int kUnderWay = TilesUnderWay(Shape::kTileBytes);
  static constexpr int kStages =
      RingLength(std::min<int>(10, kTilesOfRings / Shape::kWarpgroups), kUnderWay);
  static_assert(kUnderWay >= 1 && kStages >= 2);

  struct Shared : Fixed {
    alignas(128) Stage stages[Shape::kWarpgroups][kStages];
    CopyBarrier full[Shape::kWarpgroups][kStages];
    CopyBarrier empty[Shape::kWarpgroups][kStages];  // one arrival per thread that reads it
  };
  static_assert(sizeof(Shared) <= kSharedBytes);
};

}  // namespace tributary::cuda
