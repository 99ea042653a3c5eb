// The shapes of the wgmma prefill (sm_90a): tiles, panels, stages, products and roles of warps.
//
// Constants and pure functions only, so that host code and tests can read them too.
#pragma once

#include <cstddef>

#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// Query rows of a thread block: 64, the height of a warpgroup product, for each of two warpgroups.
inline constexpr int kWgmmaPrefillRows = 128;
// Slots of a KV tile: as many as two stages of shared memory and the accumulators of a warpgroup
// (scores, their weights and the output) leave room for.
constexpr int WgmmaPrefillKeys(int value_dim) { return value_dim > 128 ? 64 : 128; }
// KV tiles in shared memory: more where they are smaller, since a tile is then done with sooner.
constexpr int WgmmaPrefillStages(int key_dim) { return key_dim <= 64 ? 4 : key_dim < 128 ? 3 : 2; }
// Query tiles in shared memory: two where they fit, so that the next item's queries can arrive
// before the current item is done with its own.
constexpr int WgmmaPrefillQueryStages(int key_dim, int value_dim) {
  return key_dim == 256 || (key_dim > 128 && value_dim <= 128) ? 1 : 2;
}

// Tiles lie in shared memory as panels: consecutive rows of 128 bytes, or of 64 where that leaves
// less of the last panel unused. What a panel has beyond the end of a row the copy engine fills
// with zeros.
constexpr int PanelRowBytes(int row_bytes) { return row_bytes % 128 == 0 ? 128 : 64; }
constexpr int PanelsOf(int row_bytes) {
  return (row_bytes + PanelRowBytes(row_bytes) - 1) / PanelRowBytes(row_bytes);
}

inline constexpr int kWgmmaPrefillSharedBytes = 227 * 1024;  // of one multiprocessor

// Named barriers of the kernel (bar.sync); 0 is __syncthreads.
enum PrefillBarrier : int {
  kFirstTurn = 2,   // warpgroup 0 may issue products
  kSecondTurn = 3,  // warpgroup 1 may issue products
  kComputing = 8,   // both warpgroups that compute
};

// KV tiles after which sums of weights and values in eight bits are added to sums in fp32. The
// tensor cores add such products with some 14 bits, and what they lose grows with the number of
// sums.
inline constexpr int kWgmmaPrefillSummedTiles = 8;

// kScoreType is the type of keys; queries have the same unless it has eight bits, then they are
// e4m3. kComputeType is the type of values and of weights, unless it has eight bits: then weights
// are e4m3.
template <DType kScoreType, DType kComputeType, int kKeyDimension, int kValueDimension>
struct WgmmaPrefillTraits {
  static constexpr DType kScores = kScoreType;
  static constexpr DType kCompute = kComputeType;
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static constexpr int kRows = kWgmmaPrefillRows;
  static constexpr int kKeys = WgmmaPrefillKeys(kValueDim);
  static constexpr int kStages = WgmmaPrefillStages(kKeyDim);
  static constexpr int kQueryStages = WgmmaPrefillQueryStages(kKeyDim, kValueDim);

  // Warpgroups 0 and 1 compute; one thread of warpgroup 2 copies.
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = 128 * kWarpgroups;  // that compute
  static constexpr int kBlockThreads = kThreads + 128;
  static_assert(kRows == 64 * kWarpgroups);

  // One head's queries or keys in one row, and their panels.
  static constexpr int kScoreBytes = static_cast<int>(BytesOf(kScores, kKeyDim));
  static constexpr int kScoreRowBytes = PanelRowBytes(kScoreBytes);
  static constexpr int kScorePanels = PanelsOf(kScoreBytes);
  // One product of queries and keys sums over kStepBytes of a row. What the last one takes beyond
  // the row's end are zeros of the panel.
  static constexpr int kStepBytes = 32;
  static constexpr int kScoreSteps = (kScoreBytes + kStepBytes - 1) / kStepBytes;
  static constexpr int kStepsOfPanel = kScoreRowBytes / kStepBytes;
  static_assert(kStepsOfPanel * kStepBytes == kScoreRowBytes);
  static_assert(kScoreSteps <= kScorePanels * kStepsOfPanel);
  static_assert(kScoreBytes % 16 == 0, "the copy engine takes rows of whole 16-byte units");

  // The same of values. In eight bits they lie transposed, one panel for each tile: its rows are
  // dimensions, and slots lie side by side (KeptFp8::kKeysAndValues).
  static constexpr bool kFp8Values = IsFp8(kCompute);
  static constexpr DType kWeights = kFp8Values ? DType::kFp8E4M3 : kCompute;
  static_assert(!kFp8Values || kCompute == kScores);
  static constexpr int kValueBytes = kFp8Values ? kKeys : kValueDim * 2;
  static constexpr int kValueRowBytes = PanelRowBytes(kValueBytes);
  static constexpr int kValuePanels = PanelsOf(kValueBytes);
  static constexpr int kValueRows = kFp8Values ? kValueDim : kKeys;
  static_assert(!kFp8Values || kGatherSlots % kKeys == 0);
  // The dimensions of the panels: 96 for 80 in sixteen bits, else those of the value.
  static constexpr int kPaddedValueDim = kFp8Values ? kValueDim : kValuePanels * kValueRowBytes / 2;
  // The output dimensions of one product, and how many products make up the head.
  static constexpr int kDimsOfProduct = kPaddedValueDim <= 192 ? kPaddedValueDim : 128;
  static constexpr int kDimProducts = kPaddedValueDim / kDimsOfProduct;
  // How far the values of a product lie behind those of the one before it.
  static constexpr int kProductBytes = kValueRows * kValueRowBytes * kValuePanels / kDimProducts;
  static_assert(kDimProducts * kDimsOfProduct == kPaddedValueDim);
  static_assert(kFp8Values || kProductBytes == kKeys * kDimsOfProduct * 2);
  static_assert(kPaddedValueDim >= kValueDim && kPaddedValueDim - kValueDim < 32);
  // Slots that one product of weights and values sums over, and a thread's words of weights.
  static constexpr int kSlotsOfProduct = kStepBytes / static_cast<int>(SizeOf(kWeights));
  static constexpr int kWeightWords = 4 * kKeys / kSlotsOfProduct;
  static_assert(kValueBytes % 16 == 0, "the copy engine takes rows of whole 16-byte units");

  struct Queries {
    alignas(1024) std::byte panels[kScorePanels][kRows * kScoreRowBytes];
  };
  struct Keys {
    alignas(1024) std::byte panels[kScorePanels][kKeys * kScoreRowBytes];
  };
  struct Values {
    alignas(1024) std::byte panels[kValuePanels][kValueRows * kValueRowBytes];
  };
};

}  // namespace tributary::cuda
