// What AttendChunk does before any arithmetic: lay out its scratch memory, find a tile's keys and
// values, and ask memory for the next.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "hwy/base.h"
#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/tiling.h"

namespace tributary::cpu {

// Lanes over which a sum of weights is kept until the end: those of the widest vector.
inline constexpr int32_t kSumLanes = 16;

// Where things lie in a Workspace. One layout serves every arithmetic: sizes are those of the
// largest.
struct WorkspaceLayout {
  WorkspaceLayout(int32_t vectors, int32_t key_dim, int32_t value_dim) {
    const size_t wider = size_t(std::max(key_dim, value_dim));
    queries = Take(size_t(vectors) * key_dim * 3 * sizeof(uint16_t));
    logits = Take(size_t(vectors) * kTileKeys * sizeof(float));
    weights = Take(size_t(vectors) * kTileKeys * sizeof(float));
    sums = Take(size_t(vectors) * ValuePlanes(value_dim) * kValueColumns * sizeof(float));
    weight_sums = Take(size_t(vectors) * kSumLanes * sizeof(float));
    state = Take(size_t(vectors) * 2 * sizeof(float));
    row = Take(wider * sizeof(float));
    k = Take(size_t(kTileKeys) * wider * sizeof(float));
    v = Take(size_t(kTileKeys) * value_dim * sizeof(float));
  }
  size_t queries, logits, weights, sums, weight_sums, state, row, k, v;
  size_t bytes = 0;

 private:
  size_t Take(size_t n) {
    const size_t at = bytes;
    bytes += (n + 63) / 64 * 64;
    return at;
  }
};

// Bit j: slot begin + j is in the range.
inline uint64_t TileMask(KeyRange range, int64_t begin) {
  const int64_t lo = std::clamp<int64_t>(range.lo - begin, 0, kTileKeys);
  const int64_t hi = std::clamp<int64_t>(range.hi - begin, 0, kTileKeys);
  if (hi <= lo) return 0;
  const uint64_t ones = hi - lo == kTileKeys ? ~uint64_t{0} : (uint64_t{1} << (hi - lo)) - 1;
  return ones << lo;
}

inline constexpr uint64_t kWholeTile = ~uint64_t{0};

// The slots [begin, begin + kTileKeys).
struct Tile {
  static constexpr int kTileShift = std::countr_zero(static_cast<uint64_t>(kTileKeys));
  static constexpr int32_t kMaxBlocks = kTileKeys / 16;

  int64_t begin = 0;
  uint64_t live = 0;             // slots that some row sees
  bool uniform = true;           // every row sees exactly these
  int block_shift = kTileShift;  // in pages: log2 of the tokens of a block
  // In pages: from the first head to each block; where no slot is live, to one where some is.
  size_t block[kMaxBlocks] = {};

  int32_t block_tokens() const { return 1 << block_shift; }
  int32_t blocks() const { return 1 << (kTileShift - block_shift); }
};

// Planes in scratch memory are those of a tile of one block.
inline constexpr Tile kOneBlock;

// One head's keys or values of a tile, in the planes of page_layout.h.
struct PairTile {
  const std::byte* head = nullptr;
  const Tile* tile = &kOneBlock;

  int32_t blocks() const { return tile->blocks(); }
  int32_t block_tokens() const { return tile->block_tokens(); }
  const std::byte* block(int32_t i) const { return head + tile->block[i]; }
};

// Asks memory for a line, into the second-level cache: asked for so early it would not stay in the
// first.
HWY_INLINE void AskFor(const std::byte* line) { __builtin_prefetch(line, 0, 2); }

// A plane of the cache, and the plane to ask of memory while it is read, place by place; without a
// head there is none. Pages lie anywhere, so the processor cannot guess what comes next.
struct CachedPlane : PairTile {
  PairTile ahead;

  // From block i of the plane to where to ask. 0, what is read anyway, costs nothing.
  ptrdiff_t Ahead(int32_t i) const { return ahead.head == nullptr ? 0 : ahead.block(i) - block(i); }
};

// Nothing is live in a tile past the end of the chunk.
inline void LocateTile(const ChunkParams& p, int64_t begin, Tile& tile) {
  const QueryBlock& queries = p.queries;
  uint64_t all = 0, common = kWholeTile;
  for (int32_t r = 0; r < queries.rows; ++r) {
    const uint64_t mask = begin < p.chunk.hi ? TileMask(queries.keys[r], begin) : 0;
    all |= mask;
    common &= mask;
  }
  tile.begin = begin;
  tile.live = all;
  tile.uniform = common == all;
  if (p.kv.pages == nullptr || all == 0) return;
  tile.block_shift = p.kv.block_shift;
  const uint64_t of_block = kWholeTile >> (kTileKeys - tile.block_tokens());
  const int64_t first_live = std::countr_zero(all);
  for (int32_t i = 0; i < tile.blocks(); ++i) {
    const int64_t first = int64_t{i} << tile.block_shift;
    const bool used = (all >> first & of_block) != 0;
    tile.block[i] = p.kv.BlockOffset(begin + (used ? first : first_live));
  }
}

}  // namespace tributary::cpu
