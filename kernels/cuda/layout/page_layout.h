// Where an element lies inside one head's plane of a page, on the GPU. (For NVFP4 nvfp4_layout.h
// says that.)
//
// A page has the planes that kernels/paged_kv.h describes, of the same sizes, in the same order.
// Only the order of the bytes inside a plane differs: it is the order in which the tensor cores
// want them, so that a warp reads whole, consecutive 512-byte blocks straight into the registers
// from which it multiplies, without a detour through shared memory. Copying or forking whole pages
// needs no knowledge of it.
//
// Slots are taken in strips of 16 (a page holds one or more whole strips).
//   K: a key takes a multiple of 32 bytes; what lies behind its last element is zero. A strip is
//      [row bytes / 64][16 rows][64 bytes]: panels 64 bytes wide. Tokens take rows in the order in
//      which a warp multiplies them (KeyRow), and within every eight rows 16-byte chunks are
//      exchanged as warpgroup products want them in shared memory (PTX ISA, 64-byte swizzle).
//      When 32 bytes of a row remain, a tail panel of 512 bytes follows: [8 rows][4 lanes][2 rows
//      eight apart][8 bytes], so that the 16 bytes that a lane loads are its share of both rows.
//   V: [strip][value_dim / w][4 quads][w][4 tokens], w = 4 (8-bit) or 2 (16-bit elements): four
//      consecutive tokens of one dimension lie side by side, because V enters the product
//      transposed.
#pragma once

#include <cstddef>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary::cuda {

inline constexpr int kStripSlots = 16;
inline constexpr int kVectorBytes = 16;
inline constexpr int kKeyPanelBytes = 64;
inline constexpr int kKeyTailBytes = 32;  // of a row in the tail panel
inline constexpr int kTailLaneBytes = 8;  // of a row in one lane's share of the tail panel
inline constexpr int kQuadTokens = 4;

// Dimensions whose quads share one 16-byte vector of V.
TRIBUTARY_HOST_DEVICE constexpr int ValueVectorDims(int element_bytes) {
  return kVectorBytes / (kQuadTokens * element_bytes);
}

// The row of a panel that a token of a group takes: its row of a product of 16, see TokenOfRow.
TRIBUTARY_HOST_DEVICE constexpr int KeyRow(int token) {
  return token % kQuadTokens / 2 * 8 + token / kQuadTokens * 2 + token % 2;
}

// Where a 16-byte chunk of a row of a panel lies, in chunks from the row's first.
TRIBUTARY_HOST_DEVICE constexpr int KeyChunk(int row, int chunk) { return chunk ^ (row / 2 % 4); }

// Bytes that a key takes in a page: those of its elements, up to the next multiple of 32.
TRIBUTARY_HOST_DEVICE constexpr int KeyStride(int key_dim, int element_bytes) {
  return (key_dim * element_bytes + kKeyTailBytes - 1) / kKeyTailBytes * kKeyTailBytes;
}

// Whether dimension d of a key lies in the tail panel, where only kTailLaneBytes of a key lie side
// by side; elsewhere kVectorBytes do.
TRIBUTARY_HOST_DEVICE constexpr bool InKeyTail(int d, int key_dim, int element_bytes) {
  return d * element_bytes / kKeyPanelBytes == KeyStride(key_dim, element_bytes) / kKeyPanelBytes;
}

// Byte offset, in a head's K plane, of dimension d of a token (a slot of the page). Dimensions of
// the padding have offsets, too.
TRIBUTARY_HOST_DEVICE constexpr size_t KeyOffset(int token, int d, int key_dim, int element_bytes) {
  const int stride = KeyStride(key_dim, element_bytes);
  const size_t strip = size_t(token / kStripSlots) * kStripSlots * stride;
  const int byte = d * element_bytes;
  const int row = KeyRow(token % kStripSlots);
  const int panel = byte / kKeyPanelBytes;
  const int in_panel = byte % kKeyPanelBytes;
  const size_t begin = strip + size_t(panel) * kStripSlots * kKeyPanelBytes;
  if (panel == stride / kKeyPanelBytes) {
    const int lane = row % 8 * 4 + in_panel / kTailLaneBytes;
    return begin + size_t(lane) * kVectorBytes + size_t(row / 8) * kTailLaneBytes +
           size_t(in_panel % kTailLaneBytes);
  }
  const int chunk = KeyChunk(row, in_panel / kVectorBytes);
  return begin + size_t(row) * kKeyPanelBytes + size_t(chunk) * kVectorBytes +
         size_t(byte % kVectorBytes);
}

// The same for V.
TRIBUTARY_HOST_DEVICE constexpr size_t ValueOffset(int token, int d, int head_dim,
                                                   int element_bytes) {
  const int group = token / kStripSlots;
  const int dims = ValueVectorDims(element_bytes);
  const int quad = token % kStripSlots / kQuadTokens;
  const size_t vector = size_t(d / dims) * kQuadTokens + quad;
  return size_t(group) * kStripSlots * head_dim * element_bytes + vector * kVectorBytes +
         size_t(d % dims * kQuadTokens + token % kQuadTokens) * element_bytes;
}

}  // namespace tributary::cuda
