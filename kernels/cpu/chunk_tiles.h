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
  WorkspaceLayout(int32_t vectors, int32_t head_dim) {
    queries = Take(size_t(vectors) * head_dim * 3 * sizeof(uint16_t));
    logits = Take(size_t(vectors) * kTileKeys * sizeof(float));
    weights = Take(size_t(vectors) * kTileKeys * sizeof(float));
    sums = Take(size_t(vectors) * head_dim * sizeof(float));
    weight_sums = Take(size_t(vectors) * kSumLanes * sizeof(float));
    state = Take(size_t(vectors) * 2 * sizeof(float));
    row = Take(size_t(head_dim) * sizeof(float));
    k = Take(size_t(kTileKeys) * head_dim * sizeof(float));
    v = Take(size_t(kTileKeys) * head_dim * sizeof(float));
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

// What will be read some way ahead of what is worked on, asked of memory bit by bit (tiling.h says
// how far ahead and which lines). Pages lie anywhere, so the hardware cannot guess the next one.
class ReadAhead {
 public:
  static constexpr size_t kStep = 4 * kCellBytes;

  // Nothing.
  ReadAhead() = default;
  // A run of bytes; multiple of kStep.
  ReadAhead(const std::byte* at, size_t bytes, AheadPattern pattern)
      : at_(at), end_(at + bytes), pattern_(pattern) {}
  // A plane (one head's keys or values of a tile) from byte `skip` on; multiple of kStep.
  ReadAhead(const std::byte* head, const Tile& tile, size_t block_bytes, size_t skip,
            AheadPattern pattern)
      : block_bytes_(block_bytes), pattern_(pattern) {
    Enter(head, tile, tile.blocks() * block_bytes);
    for (; skip >= block_bytes; skip -= block_bytes, left_ -= block_bytes) ++block_;
    NextBlock();
    at_ += skip;
  }
  // And then the first `bytes` of another.
  void Then(const std::byte* head, const Tile& tile, size_t bytes) {
    then_head_ = head;
    then_tile_ = &tile;
    then_bytes_ = bytes;
  }

  // Goes kStep bytes on in the order of memory, until there are none left. To be called evenly: a
  // core can wait for a few dozen lines at once and stalls on the next. Into the second-level
  // cache: so far ahead is too far for the first. Inlined, or else it would cost its callers the
  // vectors they keep in registers.
  HWY_INLINE void Step() {
    if (at_ == end_) return;
    if ((reinterpret_cast<uintptr_t>(at_) & pattern_.skipped) == 0) {
      for (size_t line = 0; line < kStep; line += 64) __builtin_prefetch(at_ + line, 0, 2);
    }
    at_ += kStep;
    if (at_ == end_) NextBlock();
  }

 private:
  HWY_INLINE void Enter(const std::byte* head, const Tile& tile, size_t bytes) {
    head_ = head;
    block_ = tile.block;
    left_ = bytes;
  }
  HWY_INLINE void NextBlock() {
    if (left_ == 0) {
      if (then_bytes_ == 0) return;
      Enter(then_head_, *then_tile_, then_bytes_);
      then_bytes_ = 0;
    }
    const size_t bytes = std::min(left_, block_bytes_);
    at_ = head_ + *block_++;
    end_ = at_ + bytes;
    left_ -= bytes;
  }

  const std::byte* at_ = nullptr;   // next
  const std::byte* end_ = nullptr;  // of the block
  const std::byte* head_ = nullptr;
  const size_t* block_ = nullptr;  // from the head to the next block
  size_t block_bytes_ = 0;
  size_t left_ = 0;  // bytes of the plane in the blocks that follow
  AheadPattern pattern_;
  const std::byte* then_head_ = nullptr;
  const Tile* then_tile_ = nullptr;
  size_t then_bytes_ = 0;
};

}  // namespace tributary::cpu
