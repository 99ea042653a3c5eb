// The shapes of the mma.sync prefill: tiles, shared memory, and where in it a chunk of a row lies.
//
// Constants and pure functions only, so that host code and tests can read them too.
#pragma once

#include <cstddef>

#include "kernels/dtype.h"
#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary::cuda {

// Query rows of a thread block: 32 for each of its four warps, so that what a warp reads of keys or
// values serves two products; or 16, where two outputs would not fit the registers.
constexpr int MmaPrefillRows(int value_dim) { return value_dim > 128 ? 64 : 128; }
// Slots of a KV tile: as many as let two tiles fit the 99 KB of shared memory of an sm_86.
constexpr int MmaPrefillKeys(int key_dim) { return key_dim > 128 ? 32 : 64; }
inline constexpr int kMmaPrefillSharedBytes = 99 * 1024;

// Where 16-byte chunk `chunk` of a row with `chunks_of_row` chunks lies in shared memory, in chunks
// from the row's first. Chunks are exchanged within the largest power of two that divides their
// number, up to 8: so the same chunk of eight neighbouring rows lies in eight different places of
// the 128 bytes that the banks of shared memory deliver at once.
TRIBUTARY_HOST_DEVICE constexpr int MmaPrefillChunk(int row, int chunk, int chunks_of_row) {
  const int divisor = chunks_of_row & -chunks_of_row;
  const int exchanged = divisor < 8 ? divisor : 8;
  const int shift = exchanged == 8 ? 0 : exchanged == 4 ? 1 : exchanged == 2 ? 2 : 3;
  return chunk ^ ((row >> shift) & (exchanged - 1));
}

template <DType kComputeType, int kKeyDimension, int kValueDimension>
struct MmaPrefillTraits {
  static constexpr DType kCompute = kComputeType;
  static constexpr int kKeyDim = kKeyDimension;
  static constexpr int kValueDim = kValueDimension;
  static_assert(kKeyDim % 16 == 0 && kValueDim % 16 == 0, "a product sums over or makes 16");

  static constexpr int kRows = MmaPrefillRows(kValueDim);
  static constexpr int kKeys = MmaPrefillKeys(kKeyDim);
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTiles = kRows / (16 * kWarps);  // of 16 rows, in a warp
  static_assert(kTiles * 16 * kWarps == kRows);
  static constexpr int kStages = 2;

  // One row of queries and keys, one row of values.
  static constexpr int kKeyRowBytes = kKeyDim * 2;
  static constexpr int kValueRowBytes = kValueDim * 2;

  struct Stage {
    std::byte k[kKeys * kKeyRowBytes];
    std::byte v[kKeys * kValueRowBytes];
  };
  struct Shared {
    alignas(128) std::byte q[kRows * kKeyRowBytes];
    Stage stages[kStages];
  };
  static_assert(sizeof(Shared) <= kMmaPrefillSharedBytes);
};

}  // namespace tributary::cuda
