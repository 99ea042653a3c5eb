// How query heads are dealt to ranks when results are scattered.
#pragma once

#include <cstdint>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary::collective {

// Heads [begin, begin + count): as even as can be, the first ranks get one more. May be empty.
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
