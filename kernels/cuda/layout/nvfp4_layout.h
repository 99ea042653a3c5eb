// Where an element of an NVFP4 cache and the scale of its block lie inside one head's plane of a
// page, on the GPU. (page_layout.h says the same of the other types.)
//
// A strip of 16 slots has its elements first and their block scales behind them: 8 bytes and one
// byte for each dimension. Elements lie so that a warp reads whole, consecutive 512-byte blocks
// straight into the registers from which it multiplies:
//   K: pieces of 128 dimensions, then one each of 64, 32 and 16 as far as dimensions remain. The
//      four lanes that share a row of a product (KeyRow) have a quarter of a piece's dimensions
//      each. A piece of 128 is [2 rows eight apart][32 lanes][16 bytes], a smaller one
//      [32 lanes][2 rows eight apart][bytes].
//   V: [value_dim / 64][8 lanes' eight dimensions][4 quads of tokens][4 words]. A word has two
//      dimensions of four tokens.
// Scales of K lie as the lanes take them, too; those of V are [block][16 tokens].
//
// A word has eight codes, of which each byte holds two (CodePlace), so that three masks and three
// shifts make f16 of all of them (ptx/widen_nvfp4.cuh). No byte of V holds codes of two tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/layout/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// A byte, and which of its two codes: `high` has its magnitude in bits 6 to 4 and its sign in bit
// 0, the other one its magnitude in bits 3 to 1 and its sign in bit 7.
struct CodePlace {
  size_t byte = 0;
  bool high = false;
};

// The bits of a code (kernels/float4.h) at its place in a byte, and back.
TRIBUTARY_HOST_DEVICE constexpr uint32_t PlacedCode(uint32_t code, bool high) {
  return high ? (code & 7u) << 4 | code >> 3 : (code & 7u) << 1 | code >> 3 << 7;
}
TRIBUTARY_HOST_DEVICE constexpr uint32_t CodeOfByte(uint32_t byte, bool high) {
  return high ? (byte >> 4 & 7u) | (byte & 1u) << 3 : (byte >> 1 & 7u) | (byte >> 7 & 1u) << 3;
}

// Which byte of a word holds the i-th of four numbers (of K the dimensions i and i + 4 of eight, of
// V two dimensions of token i): widened, numbers 0 and 1 are a pair, and so are 2 and 3.
TRIBUTARY_HOST_DEVICE constexpr int ByteOfWord(int i) { return i % 2 * 2 + (i < 2 ? 1 : 0); }

// Bytes of a strip of `dims` dimensions: elements, and all.
TRIBUTARY_HOST_DEVICE constexpr int Nvfp4ElementBytes(int dims) { return kStripSlots / 2 * dims; }
TRIBUTARY_HOST_DEVICE constexpr int Nvfp4StripBytes(int dims) {
  return Nvfp4ElementBytes(dims) + kStripSlots / kNvfp4Block * dims;
}

// The piece of a key that a dimension lies in.
struct KeyPiece {
  int first = 0;  // dimension
  int dims = 0;   // 128, 64, 32 or 16
};
inline constexpr int kLargestKeyPiece = 128;
TRIBUTARY_HOST_DEVICE constexpr KeyPiece KeyPieceOf(int d, int key_dim) {
  const int whole = key_dim / kLargestKeyPiece * kLargestKeyPiece;
  if (d < whole) return {d / kLargestKeyPiece * kLargestKeyPiece, kLargestKeyPiece};
  int first = whole;
  int dims = kLargestKeyPiece / 2;
  for (; dims > kNvfp4Block; dims /= 2) {
    if ((key_dim & dims) == 0) continue;
    if (d < first + dims) break;
    first += dims;
  }
  return {first, dims};
}

// Byte offset, in a head's K plane, of what a lane has of a token's key from dimension d on: a word
// of eight dimensions, or, in a piece of 16, two bytes of four. d is a multiple of as many.
TRIBUTARY_HOST_DEVICE constexpr size_t Nvfp4KeyWord(int token, int d, int key_dim) {
  const KeyPiece piece = KeyPieceOf(d, key_dim);
  const int row = KeyRow(token % kStripSlots);
  const int of_lane = piece.dims / 4;  // dimensions
  const int lane = row % 8 * 4 + (d - piece.first) / of_lane;
  const int row_bytes = of_lane / 2;
  const int rows = piece.dims == kLargestKeyPiece ? row / 8 * (32 * row_bytes) + lane * row_bytes
                                                  : (lane * 2 + row / 8) * row_bytes;
  return size_t(token / kStripSlots) * Nvfp4StripBytes(key_dim) + Nvfp4ElementBytes(piece.first) +
         rows + (d - piece.first) % of_lane / 2;
}
// The place of dimension d of a token's key.
TRIBUTARY_HOST_DEVICE constexpr CodePlace Nvfp4KeyPlace(int token, int d, int key_dim) {
  if (KeyPieceOf(d, key_dim).dims == kNvfp4Block) {
    return {Nvfp4KeyWord(token, d / 4 * 4, key_dim) + d % 2, d % 4 >= 2};
  }
  return {Nvfp4KeyWord(token, d / 8 * 8, key_dim) + ByteOfWord(d % 4), d % 8 >= 4};
}
// Byte offset of the scale of the block of dimension d.
TRIBUTARY_HOST_DEVICE constexpr size_t Nvfp4KeyScale(int token, int d, int key_dim) {
  const KeyPiece piece = KeyPieceOf(d, key_dim);
  const int row = KeyRow(token % kStripSlots);
  const int block = (d - piece.first) / kNvfp4Block;
  const int in_piece = piece.dims == kLargestKeyPiece
                           ? (row % 8 * 4 + block / 2) * 4 + row / 8 * 2 + block % 2
                           : (row % 8 * (piece.dims / kNvfp4Block) + block) * 2 + row / 8;
  return size_t(token / kStripSlots) * Nvfp4StripBytes(key_dim) + Nvfp4ElementBytes(key_dim) +
         piece.first + in_piece;
}

// Byte offset, in a head's V plane, of the word with dimensions d and d + 1 (d is even) of the
// token's quad.
TRIBUTARY_HOST_DEVICE constexpr size_t Nvfp4ValueWord(int token, int d, int value_dim) {
  const int quad = token % kStripSlots / kQuadTokens;
  return size_t(token / kStripSlots) * Nvfp4StripBytes(value_dim) +
         (d / 8 * kQuadTokens + quad) * kVectorBytes + d % 8 / 2 * 4;
}
TRIBUTARY_HOST_DEVICE constexpr CodePlace Nvfp4ValuePlace(int token, int d, int value_dim) {
  return {Nvfp4ValueWord(token, d / 2 * 2, value_dim) + ByteOfWord(token % kQuadTokens),
          d % 2 != 0};
}
TRIBUTARY_HOST_DEVICE constexpr size_t Nvfp4ValueScale(int token, int d, int value_dim) {
  return size_t(token / kStripSlots) * Nvfp4StripBytes(value_dim) + Nvfp4ElementBytes(value_dim) +
         d / kNvfp4Block * kStripSlots + token % kStripSlots;
}

}  // namespace tributary::cuda
