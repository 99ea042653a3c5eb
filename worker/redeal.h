// Tokens that are dealt over one number of ranks, dealt over another: which bytes go where.
//
// A rank's tokens lie in runs of `interleave` slots (kernels/key_range.h), and runs stay whole. A
// page of N ranks stands for page_size * N tokens of a sequence, so a page of M ranks has the
// tokens of one or more pages of N ranks, or of parts of them.
#pragma once

#include <cstdint>
#include <vector>

namespace tributary::worker {

struct RankChange {
  int32_t from = 1;  // N: over how many ranks the tokens are dealt
  int32_t to = 1;    // M: over how many they will be
  friend bool operator==(const RankChange&, const RankChange&) = default;
};

// A page of M ranks that is to be filled.
struct MovedPage {
  int32_t page = 0;
  int64_t index = 0;  // among the pages of its sequence
  // The sequence's pages of N ranks with its tokens, from FirstSource on, as far as the sequence
  // has them. A negative one was given up.
  std::vector<int32_t> from;
  friend bool operator==(const MovedPage&, const MovedPage&) = default;
};

// The index of the first page, among those of N ranks, and of the one behind the last, with tokens
// of page `index` of M ranks.
int64_t FirstSource(const RankChange& ranks, int64_t index);
int64_t EndSource(const RankChange& ranks, int64_t index);

// One run: from a slot of the pages of a rank to a slot of those of another.
struct RunMove {
  int32_t from_rank = 0;
  int64_t from_slot = 0;
  int32_t to_rank = 0;
  int64_t to_slot = 0;
  friend bool operator==(const RunMove&, const RunMove&) = default;
};

// The runs of a page, by rank of M and slot. `interleave` divides `page_size`.
std::vector<RunMove> RunsOf(const RankChange& ranks, int32_t page_size, int32_t interleave,
                            const MovedPage& page);

}  // namespace tributary::worker
