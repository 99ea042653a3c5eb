// Where an element lies inside a page, on CPUs.
//
// A page has the size that kernels/kv_geometry.h says; the order of its bytes is the CPU backend's,
// and copying whole pages needs no knowledge of it. It is the order in which attention multiplies:
// nothing is summed over lanes, nothing is interleaved, and memory is read from one end of a page
// to the other.
//
// A page is cut into blocks of 64 tokens (a smaller page is one block). A block holds the keys of
// every head, then the values of every head. Each head has planes of pairs there. A pair is two
// numbers that one dot-product instruction multiplies and adds; a plane has one row of pairs after
// another, and a row has one pair for every column.
//
//            columns          a pair is             planes of a head
//   K        the block's      two channels of       one, with key_dim / 2 pairs per column
//            tokens           the column's token
//   V        64 channels      two tokens of the     value_dim / 64, rounded up, each with half as
//                             column's channel      many pairs per column as the block has tokens
//
// The last plane of V is as wide as what is left of value_dim: 16 channels of 80, 32 of 96.
//
// A plane is stored pair by pair, in cells of 64 bytes that cover 16 columns:
//
//   16-bit elements, one pair a cell, [column][2]:
//     | x0 x0' | x1 x1' | x2 x2' | ... | x15 x15' |
//   8-bit elements, two pairs a cell, four columns of one pair, then of the other:
//     | x0 x0' .. x3 x3' | y0 y0' .. y3 y3' | x4 x4' .. x7 x7' | y4 y4' .. | ...
//   so that interleaving bytes within 128 bits gives each pair's 16 columns in order.
//
// NVFP4 has four elements in a word of 16 bits, the first in the lowest bits, and a cell has the
// words [column][2], as it has elements of 16 bits. The four are such that a byte is one token's
// alone:
//
//   K                            the column's four pairs of channels
//   V, a plane of 64 channels    one pair of tokens: channels 16 apart
//             of 32              two pairs of tokens, two channels 16 apart of each
//             of 16              described at Nvfp4ValuePlace
//
// The block scales of a head's keys (values) follow its elements: one row of bytes for every 16
// channels, a byte per token of the block.
//
// f32 is not in pairs. Keys lie channel by channel, [key_dim][tokens], values token by token,
// [tokens][value_dim].
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/head_dims.h"
#include "kernels/paged_kv.h"

namespace tributary::cpu {

inline constexpr int32_t kMaxBlockTokens = 64;
inline constexpr int32_t kValueColumns = 64;  // channels of a plane of V, but for the last
inline constexpr int32_t kCellColumns = 16;
inline constexpr size_t kCellBytes = 64;

// Cells divide every plane: rows of keys over the four blocks that a tile may have, and channels of
// values.
static_assert(std::all_of(kHeadDims.begin(), kHeadDims.end(), [](const HeadDims& row) {
  return row.key_dim % kCellColumns == 0 && row.value_dim % kCellColumns == 0;
}));

// Planes of V that one head has in a block, and channels of the one that begins at channel `first`.
constexpr int32_t ValuePlanes(int32_t value_dim) {
  return (value_dim + kValueColumns - 1) / kValueColumns;
}
constexpr int32_t ValuePlaneColumns(int32_t value_dim, int32_t first) {
  return std::min(kValueColumns, value_dim - first);
}

// Whether elements of the type lie in pairs of whole bytes.
constexpr bool IsPaired(DType t) { return BitsOf(t) == 8 || BitsOf(t) == 16; }

constexpr int32_t BlockTokens(int32_t page_size) { return std::min(page_size, kMaxBlockTokens); }

// Pairs that a cell holds of each of its columns.
constexpr int32_t CellPairs(size_t element_bytes) {
  return static_cast<int32_t>(kCellBytes / (2 * kCellColumns * element_bytes));
}

// Bytes from the cells of a plane's pairs to the cells of the next pairs.
constexpr size_t CellRowBytes(int32_t columns) {
  return size_t(columns) / kCellColumns * kCellBytes;
}

// Byte offset, in a plane of `columns` columns, of one half (0 or 1) of a pair.
constexpr size_t PairOffset(size_t element_bytes, int32_t columns, int32_t pair, int32_t column,
                            int32_t half) {
  const int32_t cell_pairs = CellPairs(element_bytes);
  const size_t cell = size_t(pair / cell_pairs) * CellRowBytes(columns) +
                      size_t(column / kCellColumns) * kCellBytes;
  const int32_t quad = column % kCellColumns / 4;
  const int32_t element = ((quad * cell_pairs + pair % cell_pairs) * 4 + column % 4) * 2 + half;
  return cell + size_t(element) * element_bytes;
}

// Bytes of one head's keys (values) in one block. The padding that KeyRowBytes counts ends the
// plane; nothing is ever written there, nor read.
constexpr size_t KeyBlockBytes(const PagedKv& kv) {
  return KeyPlaneBytes(kv.geometry, BlockTokens(kv.page_size));
}
constexpr size_t ValueBlockBytes(const PagedKv& kv) {
  return ValuePlaneBytes(kv.geometry, BlockTokens(kv.page_size));
}
// Bytes of one block: the keys of all heads, then their values.
constexpr size_t BlockBytes(const PagedKv& kv) {
  return PageBytes(kv.geometry, BlockTokens(kv.page_size));
}

// Byte offset, in a page, of the keys of a head in the block that holds a token.
constexpr size_t KeyBlockOffset(const PagedKv& kv, int32_t head, int32_t token) {
  return size_t(token / BlockTokens(kv.page_size)) * BlockBytes(kv) +
         KeyPlaneOffset(kv.geometry, BlockTokens(kv.page_size), head);
}
// The same for V.
constexpr size_t ValueBlockOffset(const PagedKv& kv, int32_t head, int32_t token) {
  return size_t(token / BlockTokens(kv.page_size)) * BlockBytes(kv) +
         ValuePlaneOffset(kv.geometry, BlockTokens(kv.page_size), head);
}

// Byte offset, in a page, of channel d of the key of a token (a slot of the page). Not of NVFP4.
constexpr size_t KeyOffset(const PagedKv& kv, int32_t head, int32_t token, int32_t d) {
  const int32_t columns = BlockTokens(kv.page_size);
  const size_t block = KeyBlockOffset(kv, head, token);
  if (!IsPaired(kv.geometry.dtype)) {
    return block + BytesOf(kv.geometry.dtype, int64_t{d} * columns + token % columns);
  }
  return block + PairOffset(BytesOf(kv.geometry.dtype, 1), columns, d / 2, token % columns, d % 2);
}
// The same for V.
constexpr size_t ValueOffset(const PagedKv& kv, int32_t head, int32_t token, int32_t d) {
  const int32_t tokens = BlockTokens(kv.page_size);
  const size_t block = ValueBlockOffset(kv, head, token);
  if (!IsPaired(kv.geometry.dtype)) {
    const int64_t row = token % tokens;
    return block + BytesOf(kv.geometry.dtype, row * kv.geometry.value_dim + d);
  }
  const size_t plane_bytes = size_t(tokens) * kValueColumns * BytesOf(kv.geometry.dtype, 1);
  const int32_t first = d / kValueColumns * kValueColumns;
  return block + d / kValueColumns * plane_bytes +
         PairOffset(BytesOf(kv.geometry.dtype, 1), ValuePlaneColumns(kv.geometry.value_dim, first),
                    token % tokens / 2, d - first, token % 2);
}

}  // namespace tributary::cpu
