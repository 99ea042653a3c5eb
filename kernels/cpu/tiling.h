// How keys are cut, and when a sequence is shared out over threads. Pure functions: what they
// return is all that the speed depends on, and none of it changes a result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/key_range.h"

namespace tributary::cpu {

// Keys whose logits are held at once. One bit of a uint64_t is one key.
inline constexpr int64_t kTileKeys = 64;

// Keys whose logits become weights in one step.
inline constexpr int64_t kWeighedKeys = kTileKeys / 2;

// Keys that one partial covers. Chunks begin at multiples of this in local slots, whatever the
// row's range is, and a row's partials are folded in order: this fixes the arithmetic. 1024 keys of
// 128 bf16 are 512 KiB of K and V, long enough to hide the cost of the fold.
inline constexpr int64_t kChunkKeys = 1024;

// Query vectors (rows x query heads of a KV head) that share one pass over the keys. The logits and
// outputs of 64 fit beside a tile of K and V in a 1 MiB L2.
inline constexpr int32_t kMaxQueryVectors = 64;

constexpr int32_t RowsPerBlock(int32_t gqa_ratio) {
  return std::max(1, kMaxQueryVectors / gqa_ratio);
}

// Whether FP8 is converted in registers every time a block of four query vectors reads it, or once
// into memory. `passes` is how often each query vector reads it (bf16_pieces.h). Converting costs
// little beside four query vectors' arithmetic; storing and reading back twice the bytes costs more
// than converting again.
constexpr bool ReadsFloat8InPlace(int32_t query_vectors, int passes) {
  return query_vectors * passes <= 8;
}

// Of every four lines of bf16, how many memory is asked for ahead each time a block of four query
// vectors reads them, a block the first, the next block others. With one block reading takes longer
// than multiplying, and a core has places for a few dozen lines under way: where the processor's
// own prefetcher, which has more, goes on from one line of four, to ask for all would hold up the
// loads. With more blocks all are asked for, as evenly as can be.
constexpr int AskedLines(int32_t query_vectors, bool prefetcher_goes_on) {
  if (query_vectors <= 4) return prefetcher_goes_on ? 1 : 4;
  return query_vectors <= 8 ? 2 : 1;
}

// How many planes (one head's keys or values of a tile) lie between what is read and what is asked
// of memory meanwhile: 16 KiB at least, a tile of `planes` at most.
constexpr int32_t PlanesAhead(size_t plane_bytes, int32_t planes) {
  constexpr size_t kBytes = size_t{16} << 10;
  const size_t enough = (kBytes + plane_bytes - 1) / plane_bytes;
  return static_cast<int32_t>(std::min<size_t>(enough, planes));
}

// Kv heads that one job takes together. The more, the longer the runs in which memory is read, as a
// page holds its heads side by side; but there must stay enough tasks for the threads to end
// together. `head_chunks` is the chunks of all rows and all heads.
constexpr int32_t HeadsPerJob(int32_t kv_heads, int32_t query_vectors, int64_t head_chunks,
                              int threads) {
  const int64_t most = std::max(1, kMaxQueryVectors / query_vectors);
  const int64_t fair = threads == 1 ? kv_heads : head_chunks / (int64_t{2} * threads);
  return static_cast<int32_t>(std::clamp<int64_t>(fair, 1, std::min<int64_t>(kv_heads, most)));
}

// How often the pages of a run are read by entries with so many rows each.
constexpr int64_t ReadsOf(int64_t rows, int32_t gqa_ratio) {
  return (rows + RowsPerBlock(gqa_ratio) - 1) / RowsPerBlock(gqa_ratio);
}

// Whether entries that share pages should be taken together there: whether that reads the pages
// less often than if each read them for itself. A part of the entries gains less than all of them.
constexpr bool WorthSharing(std::span<const int32_t> rows_of_entries, int32_t gqa_ratio) {
  int64_t rows = 0;
  int64_t apart = 0;
  for (const int32_t of_entry : rows_of_entries) {
    rows += of_entry;
    apart += ReadsOf(of_entry, gqa_ratio);
  }
  return ReadsOf(rows, gqa_ratio) < apart;
}

struct ChunkSpan {
  int64_t first = 0;
  int64_t count = 0;
};

// The chunks that a range of slots touches.
constexpr ChunkSpan ChunksOf(KeyRange slots) {
  if (Empty(slots)) return {};
  const int64_t first = slots.lo / kChunkKeys;
  return {first, (slots.hi - 1) / kChunkKeys + 1 - first};
}

// Whether one job's chunks should be spread over threads rather than run by one. A job that is more
// than an eighth of a thread's fair share would leave threads idle at the end.
constexpr bool ShouldSplit(int64_t job_chunks, int64_t total_chunks, int threads) {
  return threads > 1 && job_chunks > 1 && job_chunks * threads * 8 > total_chunks;
}

}  // namespace tributary::cpu
