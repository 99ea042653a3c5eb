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

  __device__ std::byte* Key(int64_t slot, int d) const {
    const KvGeometry& g = args.geometry;
    return Page(slot) + size_t(head) * KeyPlane() +
           KeyOffset(InPage(slot), d, g.key_dim, SizeOf(kKv));
  }
  __device__ std::byte* Value(int64_t slot, int d) const {
    const KvGeometry& g = args.geometry;
    return Page(slot) + size_t(g.kv_heads) * KeyPlane() + size_t(head) * ValuePlane() +
           ValueOffset(InPage(slot), d, g.value_dim, SizeOf(kKv));
  }

 private:
  // Bytes of one head's keys and values in a page.
  __device__ size_t KeyPlane() const {
    return size_t(args.page_size) * KeyStride(args.geometry.key_dim, SizeOf(kKv));
  }
  __device__ size_t ValuePlane() const {
    return size_t(args.page_size) * args.geometry.value_dim * SizeOf(kKv);
  }
  __device__ std::byte* Page(int64_t slot) const {
    const int64_t page = slot >> (__ffs(args.page_size) - 1);
    return args.cache + size_t(page) * args.geometry.kv_heads * (KeyPlane() + ValuePlane());
  }
  __device__ int InPage(int64_t slot) const {
    return static_cast<int>(slot) & (args.page_size - 1);
  }
};

}  // namespace tributary::cuda
