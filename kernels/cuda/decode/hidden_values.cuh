// Values that are infinite or NaN in slots that only some packed rows of a query tile see.
//
// A product of weights and values takes every row of a query tile and every slot of a strip. A row
// that does not see a slot has no weight there, but 0 * NaN is NaN. Slots that no row sees are
// cleared (AliveTokens). In slots that some rows see and others do not, values that are not finite
// are taken out before the product and added to the rows that see them: without their weight, which
// changes nothing.
//
// Only strips where the rows' ranges differ are looked at, the last few of a causal call and the
// edges of its windows.
#pragma once

#include <cstdint>

#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/non_finite.cuh"
#include "kernels/dtype.h"

namespace tributary::cuda {

// Whether some packed rows of a tile see slots that others do not. Item is a WorkItem or has its
// ranges.
template <typename Item>
__device__ __forceinline__ bool RowsDiffer(const Item& item) {
  return item.key_begin < item.dense_begin || item.dense_end < item.key_end;
}

__device__ __forceinline__ bool Sees(const RowKeys& keys, int slot) {
  return slot >= keys.begin && slot < keys.end;
}

// What is not finite in slot `slot` (0 to 15) of a strip, of one dimension; 0 if that is finite. Of
// the dimension a lane has its four slots: in two words, `low` and `high`, or in one of eight-bit
// elements, which is both. Called by a whole warp.
template <DType kType>
__device__ __forceinline__ float NonFiniteOfSlot(uint32_t low, uint32_t high, int slot) {
  constexpr int kOfWord = 4 / static_cast<int>(SizeOf(kType));
  const uint32_t word = kOfWord == 4 || slot % 4 < 2 ? low : high;
  const int owner = static_cast<int>(threadIdx.x) % 32 / 4 * 4 + slot / 4;
  return NonFiniteOrZero<kType>(__shfl_sync(0xffffffffu, word, owner), slot % kOfWord);
}

}  // namespace tributary::cuda
