// What mma_attention's parts know of their shapes (mma_config.h), and what lies in shared memory.
#pragma once

#include "kernels/cuda/decode/cluster_merge.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm80/mma_config.h"
#include "kernels/cuda/decode/sm80/warp_results.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// What a thread block's shared memory has besides, where strips come through it
// (decode/sm90/mma_rings.cuh).
template <typename Config>
struct MmaRings {};

// A thread block's shared memory.
template <typename Config>
struct MmaSharedMemory : MmaRings<Config> {
  static constexpr int kTileRows = Config::kTileRows;

  uint4 q[Config::kRowTiles][Config::kSteps][32];  // operand B of K Q^T, as the lanes take it
  // The warps' unnormalised outputs, one tile of 8 packed rows at a time.
  alignas(16) float o[Config::kWarps][8][Config::kPaddedValueDim + 4];
  ClusterInbox<Config::kValueDim, kTileRows> inbox;  // where the cluster has other thread blocks
  PackedRowState<kTileRows> packed_rows;
  WarpResults<Config::kWarps, kTileRows> warps;
  WorkItem items[2];  // the item that is worked on, and the next one
  int is_last;
};

template <DType kKvType, int kKeyDimension, int kValueDimension, int kTilesOfRows, int kBlocks,
          bool kWithRings = false>
struct MmaTraits
    : MmaConfig<kKvType, kKeyDimension, kValueDimension, kTilesOfRows, kBlocks, kWithRings> {
  using Config =
      MmaConfig<kKvType, kKeyDimension, kValueDimension, kTilesOfRows, kBlocks, kWithRings>;
  using Shared = MmaSharedMemory<Config>;

  static constexpr DType kCompute = ComputeType(kKvType);
  // A reference is set so far below the logit that it follows, which saves adding the bias of
  // packed_rows.cuh to every weight.
  static constexpr float kBelow = kCompute == DType::kF16 ? kWeightBias : 0.0f;
  // So much may a logit exceed its reference before that is raised.
  static constexpr float kLargest = kBelow + kHeadroom;
};

}  // namespace tributary::cuda
