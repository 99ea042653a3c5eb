#include "worker/page_prefixes.h"

#include <algorithm>

namespace tributary::worker {

int64_t SharedUnits(std::span<PagePrefix* const> of_table) {
  if (of_table.empty() || of_table.front()->tables < 2) return 0;
  return std::partition_point(of_table.begin(), of_table.end(),
                              [](const PagePrefix* prefix) { return prefix->tables > 1; }) -
         of_table.begin();
}

void PagePrefixes::UpdateUnits(std::span<const int32_t> pages, size_t first_changed,
                               PrefixesOfTable* of_table) {
  const auto unit = static_cast<size_t>(unit_pages_);
  const size_t units = pages.size() / unit;
  Shorten(std::min(first_changed / unit, units), of_table);
  for (size_t u = of_table->size(); u < units; ++u) {
    const std::span<const int32_t> of_unit = pages.subspan(u * unit, unit);
    const PagePrefix* before = u == 0 ? nullptr : of_table->back();
    const auto [it, fresh] = prefixes_.try_emplace(
        PagePrefix::Key(before, std::vector<int32_t>(of_unit.begin(), of_unit.end())));
    if (fresh) it->second.key = &it->first;
    ++it->second.tables;
    of_table->push_back(&it->second);
  }
}

void PagePrefixes::Shorten(size_t units, PrefixesOfTable* of_table) {
  for (; of_table->size() > units; of_table->pop_back()) {
    PagePrefix& last = *of_table->back();
    if (--last.tables == 0) prefixes_.erase(*last.key);
  }
}

}  // namespace tributary::worker
