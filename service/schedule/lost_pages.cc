#include "service/schedule/lost_pages.h"

#include <algorithm>

namespace tributary::service {

void LostPages::Add(int rank, int32_t page) {
  std::vector<int16_t>& filled = pages_[page];
  if (filled.empty()) filled.assign(static_cast<size_t>(ranks_) * layers_, kWhole);
  std::fill_n(filled.begin() + static_cast<std::ptrdiff_t>(IndexOf(rank, 0)), layers_, int16_t{0});
}

std::optional<int32_t> LostPages::FirstLacking(int rank, int32_t page, int32_t layer) const {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return std::nullopt;
  const int16_t filled = found->second[IndexOf(rank, layer)];
  if (filled == kWhole) return std::nullopt;
  return filled;
}

void LostPages::Fill(int rank, int32_t page, int32_t layer, int32_t end) {
  const auto found = pages_.find(page);
  if (found == pages_.end()) return;
  int16_t& filled = found->second[IndexOf(rank, layer)];
  if (filled != kWhole) filled = std::max(filled, static_cast<int16_t>(end));
}

}  // namespace tributary::service
