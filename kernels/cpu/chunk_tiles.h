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

// The slots of a tile that some row sees, and where they lie from the first slot of their head.
struct TileRows {
  uint64_t live = 0;
  bool uniform = true;       // every row sees exactly these
  size_t offset[kTileKeys];  // of slots that are not live: somewhere harmless
};

// The rows that are worked on next, asked of memory bit by bit while others are worked on. Pages
// lie anywhere, so the hardware cannot guess the next one.
class AheadRows {
 public:
  // `base` is the first slot of the head. Both must outlive this.
  AheadRows(const std::byte* base, const TileRows& tile, int32_t head_dim, size_t element_bytes)
      : base_(base),
        offset_(tile.offset),
        offset_end_(tile.offset + kTileKeys),
        row_bytes_(head_dim * element_bytes),
        element_bytes_(element_bytes) {}

  // Asks for the next `elements` in the order of memory, until there are none left. To be called
  // evenly: a core can wait for a few dozen lines at once and stalls on the next. Into the
  // second-level cache: so far ahead is too far for the first.
  void Prefetch(int32_t elements) {
    if (offset_ == offset_end_) return;
    const std::byte* row = base_ + *offset_;
    for (size_t left = elements * element_bytes_;; left -= kLine) {
      __builtin_prefetch(row + column_, 0, 2);
      column_ += kLine;
      if (column_ >= row_bytes_) {
        column_ = 0;
        if (++offset_ == offset_end_) return;
        row = base_ + *offset_;
      }
      if (left <= kLine) return;
    }
  }

 private:
  static constexpr size_t kLine = 64;
  const std::byte* base_;
  const size_t* offset_;      // of the row that holds the next line
  const size_t* offset_end_;  // a tile's rows
  size_t row_bytes_;
  size_t element_bytes_;
  size_t column_ = 0;  // of the next line in its row, in bytes
};

// Nothing is live in a tile past the end of the chunk.
inline void LocateTile(const ChunkParams& p, int64_t begin, TileRows& tile) {
  const QueryBlock& queries = p.queries;
  uint64_t all = 0, common = ~uint64_t{0};
  for (int32_t r = 0; r < queries.rows; ++r) {
    const uint64_t mask = begin < p.chunk.hi ? TileMask(queries.keys[r], begin) : 0;
    all |= mask;
    common &= mask;
  }
  tile.live = all;
  tile.uniform = common == all;
  // Page by page: the rows of one page are at even distances.
  const int64_t run = p.kv.pages == nullptr
                          ? kTileKeys
                          : std::min<int64_t>(kTileKeys, int64_t{1} << p.kv.page_shift);
  for (int64_t first = 0; first < kTileKeys; first += run) {
    const uint64_t of_run = run == kTileKeys ? ~uint64_t{0} : ((uint64_t{1} << run) - 1) << first;
    const bool used = (all & of_run) != 0;
    const size_t offset = used ? p.kv.Offset(begin + first) : 0;
    const size_t step = used ? p.kv.row_bytes : 0;
    for (int64_t j = 0; j < run; ++j) {
      tile.offset[first + j] = offset + j * step;
    }
  }
}

}  // namespace tributary::cpu
