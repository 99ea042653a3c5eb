// What one token of one layer of a KV cache is: heads, dimensions, and the type of an element. The
// bytes of planes and pages follow from it here and are computed nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace tributary {

struct KvGeometry {
  int32_t kv_heads = 0;
  int32_t key_dim = 0;    // elements of a key (and of a query) in one head
  int32_t value_dim = 0;  // elements of a value (and of an output) in one head
  // The value is the first `value_dim` elements of the key and is not stored a second time.
  bool value_in_key = false;
  DType dtype = DType::kBf16;  // of a stored element

  bool operator==(const KvGeometry&) const = default;
};

// The geometry whose values have as many dimensions as its keys.
constexpr KvGeometry SquareGeometry(int32_t kv_heads, int32_t head_dim, DType dtype) {
  return {.kv_heads = kv_heads, .key_dim = head_dim, .value_dim = head_dim, .dtype = dtype};
}

// A key's elements take a multiple of so many bytes in a page, because that is the unit that a
// tensor core multiplies (of NVFP4, widened to f16, 16 elements). What lies behind the last element
// is padding; kernels that load it write zeros there.
constexpr size_t KeyRowAlignment(DType t) { return t == DType::kNvfp4 ? 8 : 32; }

// Bytes of the elements of one token's key in one head, without and with the padding.
constexpr size_t KeyBytes(const KvGeometry& g) { return BytesOf(g.dtype, g.key_dim); }
constexpr size_t KeyRowBytes(const KvGeometry& g) {
  const size_t unit = KeyRowAlignment(g.dtype);
  return (KeyBytes(g) + unit - 1) / unit * unit;
}
// Bytes of the elements of one token's value in one head. Values have no padding.
constexpr size_t ValueBytes(const KvGeometry& g) { return BytesOf(g.dtype, g.value_dim); }

// Bytes of the block scales of one token's key (value) in one head.
constexpr size_t KeyScaleBytes(const KvGeometry& g) { return BlockScaleBytes(g.dtype, g.key_dim); }
constexpr size_t ValueScaleBytes(const KvGeometry& g) {
  return BlockScaleBytes(g.dtype, g.value_dim);
}

// Bytes of one token's key (value) in one head, its block scales included, without padding.
constexpr size_t StoredKeyBytes(const KvGeometry& g) { return KeyBytes(g) + KeyScaleBytes(g); }
constexpr size_t StoredValueBytes(const KvGeometry& g) {
  return ValueBytes(g) + ValueScaleBytes(g);
}

// Bytes of the keys (values) of one head in a page of `page_size` slots of one layer: the elements
// of all slots, then their block scales.
constexpr size_t KeyPlaneBytes(const KvGeometry& g, int32_t page_size) {
  return size_t(page_size) * (KeyRowBytes(g) + KeyScaleBytes(g));
}
constexpr size_t ValuePlaneBytes(const KvGeometry& g, int32_t page_size) {
  return g.value_in_key ? 0 : size_t(page_size) * (ValueBytes(g) + ValueScaleBytes(g));
}

// Bytes of a page of one layer: the planes of all heads' keys, then those of all heads' values.
constexpr size_t PageBytes(const KvGeometry& g, int32_t page_size) {
  return size_t(g.kv_heads) * (KeyPlaneBytes(g, page_size) + ValuePlaneBytes(g, page_size));
}

// Where a head's plane begins, in bytes from the begin of the page.
constexpr size_t KeyPlaneOffset(const KvGeometry& g, int32_t page_size, int32_t head) {
  return size_t(head) * KeyPlaneBytes(g, page_size);
}
constexpr size_t ValuePlaneOffset(const KvGeometry& g, int32_t page_size, int32_t head) {
  if (g.value_in_key) return KeyPlaneOffset(g, page_size, head);
  return size_t(g.kv_heads) * KeyPlaneBytes(g, page_size) +
         size_t(head) * ValuePlaneBytes(g, page_size);
}

// Elements that one token has in all heads, keys and values together: what an append reads.
constexpr int64_t ElementsPerToken(const KvGeometry& g) {
  return int64_t{g.kv_heads} * (int64_t{g.key_dim} + (g.value_in_key ? 0 : g.value_dim));
}

// Bytes that attention reads of one token in one head, without padding.
constexpr int64_t BytesPerTokenOfHead(const KvGeometry& g) {
  return static_cast<int64_t>(StoredKeyBytes(g) + (g.value_in_key ? 0 : StoredValueBytes(g)));
}

}  // namespace tributary
