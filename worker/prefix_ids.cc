#include "worker/prefix_ids.h"

#include <algorithm>

namespace tributary::worker {

void PrefixIds::Update(std::span<const int32_t> pages, size_t first_changed,
                       std::vector<uint64_t>* ids) {
  if (unit_pages_ == 0) return;
  const auto unit = static_cast<size_t>(unit_pages_);
  Shorten(std::min(first_changed / unit, pages.size() / unit), ids);
  for (size_t u = ids->size(); u < pages.size() / unit; ++u) {
    const std::span<const int32_t> of_unit = pages.subspan(u * unit, unit);
    Key key(u == 0 ? 0 : ids->back(), std::vector<int32_t>(of_unit.begin(), of_unit.end()));
    const auto [node, fresh] = nodes_.try_emplace(key);
    if (fresh) {
      node->second.id = ++last_id_;
      keys_.emplace(last_id_, std::move(key));
    }
    ++node->second.tables;
    ids->push_back(node->second.id);
  }
}

void PrefixIds::Shorten(size_t units, std::vector<uint64_t>* ids) {
  for (; ids->size() > units; ids->pop_back()) {
    const auto key = keys_.find(ids->back());
    const auto node = nodes_.find(key->second);
    if (--node->second.tables > 0) continue;
    nodes_.erase(node);
    keys_.erase(key);
  }
}

}  // namespace tributary::worker
