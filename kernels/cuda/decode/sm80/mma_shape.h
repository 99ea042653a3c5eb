// What a lane of mma_attention has of a strip of K and of V, by type of cache and head dims.
#pragma once

#include <cstddef>

#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// Elements of whole bytes.
template <DType kKvType, int kKeyDimension, int kValueDimension>
struct MmaShape {
  static constexpr int kElementBytes = int(SizeOf(kKvType));

  // K of a strip: full panels and, if 32 bytes of a row remain, a tail panel (page_layout.h).
  static constexpr int kKeyBytes = KeyStride(kKeyDimension, kElementBytes);  // of one slot
  static constexpr int kPanels = kKeyBytes / kKeyPanelBytes;
  static constexpr bool kHasTail = kKeyBytes % kKeyPanelBytes != 0;
  static_assert(kKeyDimension * kElementBytes <= kKeyBytes);
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
  static constexpr bool kLastStepWhole = kElementBytes == 1;

  // V of a strip: every lane has so many vectors of 16 bytes. If the last of them are fewer than a
  // warp has lanes, the lanes without one hold zeros: dimensions that are computed and not stored.
  static constexpr int kVectorDims = 8 * ValueVectorDims(kElementBytes);  // in a warp's 512 bytes
  static constexpr int kValueVectors = (kValueDimension + kVectorDims - 1) / kVectorDims;

  static constexpr size_t kKeyStripBytes = size_t(kStripSlots) * kKeyBytes;
  static constexpr size_t kValueStripBytes = size_t(kStripSlots) * kValueDimension * kElementBytes;

  // Strips that a warp takes in a step: two if one is too little to keep memory busy.
  static constexpr int kStrips = kKeyStripBytes <= 1024 ? 2 : 1;
  // Whether a few registers may lie in local memory if more warps then keep memory busy.
  static constexpr bool kSpills = true;
  // Registers that hold one strip.
  static constexpr int kStripRegisters = kPanels * 8 + (kHasTail ? 4 : 0) + kValueVectors * 4;
};

// Four bits, and block scales (nvfp4_layout.h). A lane has a word of scales beside each vector of
// V.
template <int kKeyDimension, int kValueDimension>
struct MmaShape<DType::kNvfp4, kKeyDimension, kValueDimension> {
  static constexpr int kStagedDims = kKeyDimension;
  static constexpr int kFullSteps = kKeyDimension / 32;
  static constexpr int kSteps = (kKeyDimension + 31) / 32;
  static constexpr bool kLastStepWhole = false;

  static constexpr int kVectorDims = 64;
  static constexpr int kValueVectors = (kValueDimension + kVectorDims - 1) / kVectorDims;

  static constexpr size_t kKeyStripBytes = Nvfp4StripBytes(kKeyDimension);
  static constexpr size_t kValueStripBytes = Nvfp4StripBytes(kValueDimension);

  static constexpr int kStrips = kKeyDimension <= 128 ? 2 : 1;
  static constexpr int kStripRegisters = kKeyDimension / 128 * 9 + 4 + kValueVectors * 5;
  static constexpr bool kSpills = false;
};

}  // namespace tributary::cuda
