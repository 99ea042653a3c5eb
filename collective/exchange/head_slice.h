// How query heads are dealt to ranks when results are scattered.
#pragma once

#include <cstdint>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary::collective {

// Heads [begin, begin + count). Slices are as even as possible: where the heads do not divide
// evenly, the first ranks get one more than the others. A slice may be empty.
struct HeadSlice {
  int32_t begin = 0;
  int32_t count = 0;
};

TRIBUTARY_HOST_DEVICE constexpr HeadSlice SliceOfRank(int32_t heads, int32_t size, int32_t rank) {
  const int32_t base = heads / size;
  const int32_t extra = heads % size;
  return {rank * base + (rank < extra ? rank : extra), base + (rank < extra ? 1 : 0)};
}

}  // namespace tributary::collective
