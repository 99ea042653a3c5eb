// One layer of one shard of the KV cache, in pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace tributary {

// A page holds `page_size` consecutive local slots of one sequence. The order of the bytes inside a
// page belongs to the backend that writes and reads it (kernels/cpu/page_layout.h,
// kernels/cuda/layout/page_layout.h); pages are copied whole. The reference has the plain order: K
// comes first, then V, each [kv_heads, page_size, head_dim]. The view owns nothing.
struct PagedKv {
  std::byte* base = nullptr;  // [num_pages, 2, kv_heads, page_size, head_dim] of dtype
  int32_t num_pages = 0;
  int32_t page_size = 0;  // 16, 32, 64 or 128
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::kBf16;
  // What a stored element is multiplied by to give the real one; nullptr means all ones.
  const float* k_scale = nullptr;  // [kv_heads]
  const float* v_scale = nullptr;  // [kv_heads]
};

// Bytes of one head's K (or V) in one page.
constexpr size_t HeadPlaneBytes(const PagedKv& kv) {
  return size_t(kv.page_size) * size_t(kv.head_dim) * SizeOf(kv.dtype);
}
constexpr size_t PageBytes(const PagedKv& kv) {
  return 2 * size_t(kv.kv_heads) * HeadPlaneBytes(kv);
}

// [page_size, head_dim] of one head, in the order of the reference.
inline std::byte* KeyPlane(const PagedKv& kv, int32_t page, int32_t head) {
  return kv.base + size_t(page) * PageBytes(kv) + size_t(head) * HeadPlaneBytes(kv);
}
inline std::byte* ValuePlane(const PagedKv& kv, int32_t page, int32_t head) {
  return KeyPlane(kv, page, head) + size_t(kv.kv_heads) * HeadPlaneBytes(kv);
}

}  // namespace tributary
