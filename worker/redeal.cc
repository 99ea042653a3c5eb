#include "worker/redeal.h"

#include "kernels/key_range.h"

namespace tributary::worker {

int64_t FirstSource(const RankChange& ranks, int64_t index) {
  return index * ranks.to / ranks.from;
}

int64_t EndSource(const RankChange& ranks, int64_t index) {
  return ((index + 1) * ranks.to + ranks.from - 1) / ranks.from;
}

std::vector<RunMove> RunsOf(const RankChange& ranks, int32_t page_size, int32_t interleave,
                            const MovedPage& page) {
  std::vector<RunMove> runs;
  const int64_t first = FirstSource(ranks, page.index);
  for (int32_t to = 0; to < ranks.to; ++to) {
    const DcpLayout after{to, ranks.to, interleave};
    for (int32_t slot = 0; slot < page_size; slot += interleave) {
      const int64_t token = GlobalPosition(after, page.index * page_size + slot);
      DcpLayout before{0, ranks.from, interleave};
      before.rank = OwnerOf(before, token);
      const int64_t source = LocalSlot(before, token);
      const int64_t place = source / page_size - first;
      if (place < 0 || place >= static_cast<int64_t>(page.from.size())) continue;
      const int32_t source_page = page.from[static_cast<size_t>(place)];
      if (source_page < 0) continue;
      runs.push_back({.from_rank = before.rank,
                      .from_slot = int64_t{source_page} * page_size + source % page_size,
                      .to_rank = to,
                      .to_slot = int64_t{page.page} * page_size + slot});
    }
  }
  return runs;
}

}  // namespace tributary::worker
