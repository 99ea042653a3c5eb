// The tile shapes of mma_attention: what a warp takes in a step, and how many warps a thread block
// has. Host code reads them, too, to choose a kernel and to plan for it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/layout/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// kRowTiles: tiles of 8 packed rows in a query tile. kBlocks: thread blocks per multiprocessor.
template <DType kKvType, int kKeyDimension, int kValueDimension, int kTilesOfRows, int kBlocks>
struct MmaConfig {
  static constexpr DType kKv = kKvType;
  static constexpr int kElementBytes = int(SizeOf(kKv));
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kRowTiles = kTilesOfRows;
  static constexpr int kTileRows = 8 * kRowTiles;
  static constexpr int kBlocksPerMultiprocessor = kBlocks;
  static_assert(kRowTiles == 1 || kRowTiles == 2);
  static_assert(kBlocks == 1 || kBlocks == 2);

  // K of a strip: full panels and, if 32 bytes of a row remain, a tail panel (page_layout.h).
  static constexpr int kKeyBytes = KeyStride(kKeyDim, kElementBytes);  // of one slot
  static constexpr int kPanels = kKeyBytes / kKeyPanelBytes;
  static constexpr bool kHasTail = kKeyBytes % kKeyPanelBytes != 0;
  static_assert(kKeyDim * kElementBytes <= kKeyBytes);
  static_assert(kKeyBytes % kKeyPanelBytes == (kHasTail ? kKeyTailBytes : 0));
  static_assert(kKeyBytes % kElementBytes == 0);
  static constexpr int kStagedDims = kKeyBytes / kElementBytes;  // of a query, padding included

  // The contraction over a strip's K, in steps of two products of depth 16. The tail panel is one
  // step; with 16-bit elements it has only the first of the two products.
  static constexpr int kQuadsPerVector = kVectorBytes / (4 * kElementBytes);
  static_assert(kQuadsPerVector % 2 == 0);
  static constexpr int kStepsPerPanel = kQuadsPerVector / 2;
  static constexpr int kFullSteps = kPanels * kStepsPerPanel;
  static constexpr int kSteps = kFullSteps + (kHasTail ? 1 : 0);

  // V of a strip: every lane has so many vectors of 16 bytes. If the last of them are fewer than a
  // warp has lanes, the lanes without one hold zeros: dimensions that are computed and not stored.
  static constexpr int kVectorDims = 8 * ValueVectorDims(kElementBytes);  // in a warp's 512 bytes
  static constexpr int kValueVectors = (kValueDim + kVectorDims - 1) / kVectorDims;
  static constexpr int kPaddedValueDim = kValueVectors * kVectorDims;
  static constexpr int kDimTiles = kPaddedValueDim / 16;  // of 16 dimensions of the output
  static constexpr int kTilesPerVector = kDimTiles / kValueVectors;
  static_assert(kValueDim % 16 == 0);
  static_assert(kDimTiles * 16 == kPaddedValueDim && kTilesPerVector * kValueVectors == kDimTiles);

  static constexpr size_t kKeyStripBytes = size_t(kStripSlots) * kKeyBytes;
  static constexpr size_t kValueStripBytes = size_t(kStripSlots) * kValueDim * kElementBytes;

  // Strips that a warp takes in a step: two if one is too little to keep memory busy.
  static constexpr int kStrips = kKeyStripBytes <= 1024 ? 2 : 1;

  // Warps of a multiprocessor: as many as the accumulators and one strip of K and V leave registers
  // for, and at least so many that what they ask for at once keeps memory busy, even if a few
  // registers then lie in local memory.
  static constexpr int kRegisters =
      kDimTiles * kRowTiles * 4 + kPanels * 8 + (kHasTail ? 4 : 0) + kValueVectors * 4;
  static constexpr int kStepBytes = kStrips * int(kKeyStripBytes + kValueStripBytes);
  static constexpr int kBusyBytes = 48 * 1024;
  static constexpr int kWarpsByRegisters = kRegisters <= 64 ? 16 : kRegisters <= 96 ? 12 : 8;
  static constexpr int kWarpsByBytes = 8 * kStepBytes >= kBusyBytes    ? 8
                                       : 12 * kStepBytes >= kBusyBytes ? 12
                                                                       : 16;
  static constexpr int kWarps =
      std::max(kWarpsByRegisters, kWarpsByBytes) / kBlocksPerMultiprocessor;
  static constexpr int kThreads = 32 * kWarps;
};

}  // namespace tributary::cuda
