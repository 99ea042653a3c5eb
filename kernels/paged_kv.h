// One layer of one shard of the KV cache, in pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kv_geometry.h"

namespace tributary {

// A page holds `page_size` consecutive local slots of one sequence. The order of the bytes inside a
// page belongs to the backend that writes and reads it (kernels/cpu/page_layout.h,
// kernels/cuda/layout/page_layout.h); pages are copied whole. The reference has the plain order: K
// comes first, then V: [kv_heads, page_size, KeyRowBytes], [kv_heads, page_size, ValueBytes]; with
// block scales, those of all slots of a head follow its elements. The view owns nothing.
struct PagedKv {
  std::byte* base = nullptr;  // [num_pages, PageBytes]
  int32_t num_pages = 0;
  int32_t page_size = 0;  // 16, 32, 64 or 128
  KvGeometry geometry;
  // What a stored element is multiplied by to give the real one; nullptr means all ones.
  const float* k_scale = nullptr;  // [kv_heads]
  const float* v_scale = nullptr;  // [kv_heads]
};

constexpr size_t PageBytes(const PagedKv& kv) { return PageBytes(kv.geometry, kv.page_size); }

// The begin of one head's keys, in a page of the reference: one key every KeyRowBytes.
inline std::byte* KeyPlane(const PagedKv& kv, int32_t page, int32_t head) {
  return kv.base + size_t(page) * PageBytes(kv) + KeyPlaneOffset(kv.geometry, kv.page_size, head);
}
// The same of its values: one value every ValueBytes.
inline std::byte* ValuePlane(const PagedKv& kv, int32_t page, int32_t head) {
  return kv.base + size_t(page) * PageBytes(kv) + ValuePlaneOffset(kv.geometry, kv.page_size, head);
}

// Where the key (value) of one slot of a page lies, in the order of the reference.
inline std::byte* KeyRow(const PagedKv& kv, int32_t page, int32_t head, int32_t slot) {
  return KeyPlane(kv, page, head) + size_t(slot) * KeyRowBytes(kv.geometry);
}
inline std::byte* ValueRow(const PagedKv& kv, int32_t page, int32_t head, int32_t slot) {
  return ValuePlane(kv, page, head) + size_t(slot) * ValueBytes(kv.geometry);
}
// Where the block scales of the key (value) of one slot lie, in the order of the reference.
inline std::byte* KeyScales(const PagedKv& kv, int32_t page, int32_t head, int32_t slot) {
  return KeyPlane(kv, page, head) + size_t(kv.page_size) * KeyRowBytes(kv.geometry) +
         size_t(slot) * KeyScaleBytes(kv.geometry);
}
inline std::byte* ValueScales(const PagedKv& kv, int32_t page, int32_t head, int32_t slot) {
  return ValuePlane(kv, page, head) + size_t(kv.page_size) * ValueBytes(kv.geometry) +
         size_t(slot) * ValueScaleBytes(kv.geometry);
}

}  // namespace tributary
