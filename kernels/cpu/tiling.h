// How keys are cut, and when a sequence is shared out over threads. Pure functions: what they
// return is all that the speed depends on, and none of it changes a result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/key_range.h"

namespace tributary::cpu {

// Keys whose logits are held at once. One bit of a uint64_t is one key.
inline constexpr int64_t kTileKeys = 64;

// Keys that one partial covers. Chunks begin at multiples of this in local slots, whatever the
// row's range is, and a row's partials are folded in order: this fixes the arithmetic. 1024 keys of
// 128 bf16 are 512 KiB of K and V, long enough to hide the cost of the fold.
inline constexpr int64_t kChunkKeys = 1024;

// Query vectors (rows x heads of a group) that share one pass over the keys. The logits and outputs
// of 64 fit beside a tile of K and V in a 1 MiB L2.
inline constexpr int32_t kMaxQueryVectors = 64;

constexpr int32_t RowsPerBlock(int32_t group) { return std::max(1, kMaxQueryVectors / group); }

// Whether FP8 is converted in registers every time a block of four query vectors reads it, or once
// into memory. `passes` is how often each query vector reads it (bf16_pieces.h). Converting costs
// little beside four query vectors' arithmetic; storing and reading back twice the bytes costs more
// than converting again.
constexpr bool ReadsFloat8InPlace(int32_t query_vectors, int passes) {
  return query_vectors * passes <= 8;
}

// Which lines of memory are asked for, and how far ahead of their use.
struct AheadPattern {
  size_t distance = 0;  // bytes
  size_t skipped = 0;   // address bits: a step at an address with any of them is not asked for
};

// Where arithmetic takes longer than reading, every line is asked for: the requests are in time and
// few at once. Where reading takes longer they would fill the few dozen places a core has for lines
// under way and hold up the loads themselves. The processor's own prefetcher has more, but starts
// anew with every 4 KiB: it is shown the first lines of the next 4 KiB and left to do the rest.
// `query_vectors` is how many multiply with what is read.
constexpr AheadPattern AheadPatternOf(int32_t query_vectors, size_t element_bytes) {
  const auto products = static_cast<int32_t>(query_vectors * 2 / element_bytes);  // of a line
  if (products >= 8) return {.distance = size_t{8} << 10, .skipped = 0};
  return {.distance = size_t{4} << 10, .skipped = 4096 - 256};
}

// Kv heads that one job takes together. The more, the longer the runs in which memory is read, as a
// page holds its heads side by side; but there must stay enough tasks for the threads to end
// together. `head_chunks` is the chunks of all rows and all heads.
constexpr int32_t HeadsPerJob(int32_t kv_heads, int32_t query_vectors, int64_t head_chunks,
                              int threads) {
  const int64_t most = std::max(1, kMaxQueryVectors / query_vectors);
  const int64_t fair = threads == 1 ? kv_heads : head_chunks / (int64_t{4} * threads);
  return static_cast<int32_t>(std::clamp<int64_t>(fair, 1, std::min<int64_t>(kv_heads, most)));
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
