// What AttendChunk does before any arithmetic: lay out its scratch memory, and find the rows of a
// tile that some query sees.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend_chunk.h"
#include "kernels/cpu/tiling.h"

namespace tributary::cpu {

// Where things lie in a Workspace. One layout serves every arithmetic: sizes are those of the
// largest.
struct WorkspaceLayout {
  WorkspaceLayout(int32_t vectors, int32_t head_dim) {
    queries = Take(size_t(vectors) * head_dim * 3 * sizeof(uint16_t));
    logits = Take(size_t(vectors) * kTileKeys * sizeof(float));
    weights = Take(size_t(vectors) * kTileKeys * sizeof(float));
    sums = Take(size_t(vectors) * head_dim * sizeof(float));
    state = Take(size_t(vectors) * 3 * sizeof(float));
    zeros = Take(size_t(head_dim) * sizeof(float));
    k = Take(size_t(kTileKeys) * head_dim * sizeof(float));
    v = Take(size_t(kTileKeys) * head_dim * sizeof(float));
  }
  size_t queries, logits, weights, sums, state, zeros, k, v;
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

// The slots of a tile that some row sees, and where they lie.
struct TileRows {
  uint64_t live = 0;
  bool uniform = true;  // every row sees exactly these
  const std::byte* k[kTileKeys];
  const std::byte* v[kTileKeys];
};

inline void LocateTile(const ChunkParams& p, int64_t begin, TileRows& tile) {
  const QueryBlock& queries = p.queries;
  const int64_t end = std::min(p.chunk.hi, begin + kTileKeys);
  tile.live = 0;
  for (int32_t r = 0; r < queries.rows; ++r) tile.live |= TileMask(queries.keys[r], begin);
  tile.live &= TileMask({begin, end}, begin);
  tile.uniform = true;
  for (int32_t r = 0; r < queries.rows; ++r) {
    tile.uniform &= (TileMask(queries.keys[r], begin) & tile.live) == tile.live;
  }
  for (int64_t j = 0; j < kTileKeys; ++j) {
    if ((tile.live >> j & 1) == 0) continue;
    const size_t offset = p.kv.Offset(begin + j);
    tile.k[j] = p.kv.k + offset;
    tile.v[j] = p.kv.v + offset;
  }
}

}  // namespace tributary::cpu
