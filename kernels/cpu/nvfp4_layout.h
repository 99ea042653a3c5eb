// Where an element of NVFP4 and its block scale lie inside a head's keys or values of a block
// (page_layout.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cpu {

// Elements that a word of 16 bits holds.
inline constexpr int32_t kWordElements = 4;
// Rows of cells that keys have for the channels of one block scale.
inline constexpr int32_t kKeyScaleRows = kNvfp4Block / 2 / kWordElements;

// The byte, and in which of its halves (0: the lower bits).
struct NibblePlace {
  size_t byte = 0;
  int32_t half = 0;
};

// Of word `word` of a cell, counted from the cell.
constexpr NibblePlace NibbleOfWord(size_t word, int32_t element) {
  return {word * 2 + static_cast<size_t>(element / 2), element % 2};
}

// Of channel d of the key of a token. `tokens`: of the block; from the head's keys there.
constexpr NibblePlace Nvfp4KeyPlace(int32_t tokens, int32_t token, int32_t d) {
  const int32_t pair = d / 2;
  const size_t cell = size_t(pair / kWordElements) * CellRowBytes(tokens) +
                      size_t(token / kCellColumns) * kCellBytes;
  NibblePlace place = NibbleOfWord(size_t(token % kCellColumns * 2 + d % 2), pair % kWordElements);
  place.byte += cell;
  return place;
}

// Bytes of a plane of values.
constexpr size_t Nvfp4PlaneBytes(int32_t tokens, int32_t columns) {
  return size_t(tokens) * columns / 2;
}

// Of channel `column` of a plane of 64, 32 or 16 channels of a token's value, from the plane.
//
// A plane of 16 has four pairs of tokens in a cell, and eight bytes for each token: channel c and
// channel c + 8 share one. That of pair p, half h (of the pair), channel c is byte p % 2 of word
// (c + p / 2 * 8) * 2 + h: the cell's lower half has the first two pairs.
constexpr NibblePlace Nvfp4ValuePlace(int32_t columns, int32_t token, int32_t column) {
  const int32_t groups = columns / kCellColumns;      // of 16 channels
  const int32_t cell_pairs = kWordElements / groups;  // of tokens
  const int32_t pair = token / 2 % cell_pairs;
  const size_t cell = size_t(token / 2 / cell_pairs) * kCellBytes;
  if (groups == 1) {
    const int32_t word = (column % 8 + pair / 2 * 8) * 2 + token % 2;
    return {cell + size_t(word) * 2 + pair % 2, column / 8};
  }
  const int32_t word = column % kCellColumns * 2 + token % 2;
  NibblePlace place = NibbleOfWord(size_t(word), pair * groups + column / kCellColumns);
  place.byte += cell;
  return place;
}

// From a head's keys (values) of a block to their block scales, and from those to the one of a
// token's channels [16 * group, 16 * group + 16).
constexpr size_t BlockScalesOffset(int32_t tokens, int32_t dim) {
  return BytesOf(DType::kNvfp4, int64_t{tokens} * dim);
}
constexpr size_t BlockScaleOffset(int32_t tokens, int32_t token, int32_t group) {
  return size_t(group) * tokens + token;
}

}  // namespace tributary::cpu
