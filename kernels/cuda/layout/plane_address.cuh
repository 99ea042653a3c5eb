// Where the elements of one head lie in the cache, for the kernels that write new tokens and that
// compare with them.
#pragma once

#include "kernels/cuda/append/append.h"
#include "kernels/cuda/layout/page_layout.h"

namespace tributary::cuda {

template <DType kKv>
struct PlaneAddress {
  const AppendArgs& args;
  int head;

  __device__ std::byte* Plane(int64_t slot, bool values) const {
    const int64_t page = slot >> (__ffs(args.page_size) - 1);
    const size_t plane = size_t(args.page_size) * args.head_dim * SizeOf(kKv);
    return args.cache +
           (size_t(page) * 2 * args.kv_heads + (values ? args.kv_heads : 0) + head) * plane;
  }
  __device__ int InPage(int64_t slot) const {
    return static_cast<int>(slot) & (args.page_size - 1);
  }
  __device__ std::byte* Key(int64_t slot, int d) const {
    return Plane(slot, false) + KeyOffset(InPage(slot), d, args.head_dim, SizeOf(kKv));
  }
  __device__ std::byte* Value(int64_t slot, int d) const {
    return Plane(slot, true) + ValueOffset(InPage(slot), d, args.head_dim, SizeOf(kKv));
  }
};

}  // namespace tributary::cuda
