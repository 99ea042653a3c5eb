// The tile shapes of mma_attention: what a warp takes in a step, and how many warps a thread block
// has. Host code reads them, too, to choose a kernel and to plan for it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/decode/sm80/mma_shape.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// kRowTiles: tiles of 8 packed rows in a query tile. kBlocks: thread blocks per multiprocessor.
// kWithRings: strips come through shared memory (decode/sm90/mma_rings.cuh).
template <DType kKvType, int kKeyDimension, int kValueDimension, int kTilesOfRows, int kBlocks,
          bool kWithRings = false>
struct MmaConfig : MmaShape<kKvType, kKeyDimension, kValueDimension> {
  using Shape = MmaShape<kKvType, kKeyDimension, kValueDimension>;
  using Shape::kKeyStripBytes, Shape::kValueStripBytes, Shape::kValueVectors, Shape::kVectorDims;
  static constexpr bool kRings = kWithRings;
  static constexpr int kStrips = kRings ? 1 : Shape::kStrips;
  // Whether the strips leave no registers for what is asked for long ahead of its use.
  static constexpr bool kRegistersAreScarce = kKvType == DType::kNvfp4 && !kRings;
  static constexpr DType kKv = kKvType;
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kRowTiles = kTilesOfRows;
  static constexpr int kTileRows = 8 * kRowTiles;
  static constexpr int kBlocksPerMultiprocessor = kBlocks;
  static_assert(kRowTiles == 1 || kRowTiles == 2);
  static_assert(kBlocks == 1 || kBlocks == 2);

  static constexpr int kPaddedValueDim = kValueVectors * kVectorDims;
  static constexpr int kDimTiles = kPaddedValueDim / 16;  // of 16 dimensions of the output
  static constexpr int kTilesPerVector = kDimTiles / kValueVectors;
  static_assert(kValueDim % 16 == 0);
  static_assert(kDimTiles * 16 == kPaddedValueDim && kTilesPerVector * kValueVectors == kDimTiles);

  // Warps of a multiprocessor, with rings or without: as many as the accumulators and one strip of
  // K and V leave registers for, and at least so many that what they ask for at once keeps memory
  // busy, even if a few registers then lie in local memory.
  static constexpr int kRegisters = kDimTiles * kRowTiles * 4 + Shape::kStripRegisters;
  static constexpr int kStepBytes = Shape::kStrips * int(kKeyStripBytes + kValueStripBytes);
  static constexpr int kBusyBytes = Shape::kSpills ? 48 * 1024 : 0;
  static constexpr int kWarpsByRegisters = kRegisters <= 64 ? 16 : kRegisters <= 96 ? 12 : 8;
  static constexpr int kWarpsByBytes = 8 * kStepBytes >= kBusyBytes    ? 8
                                       : 12 * kStepBytes >= kBusyBytes ? 12
                                                                       : 16;
  static constexpr int kWarps =
      std::max(kWarpsByRegisters, kWarpsByBytes) / kBlocksPerMultiprocessor;
  static constexpr int kThreads = 32 * kWarps;
};

}  // namespace tributary::cuda
