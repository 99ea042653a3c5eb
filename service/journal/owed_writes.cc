#include "service/journal/owed_writes.h"

#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace tributary::service {

void OwedWrites::Add(const std::deque<JournalWrite>& failed) {
  for (const JournalWrite& write : failed) {
    if (write.key.empty()) continue;
    writes_.push_back(write);
    writes_.back().done = nullptr;  // has been told
  }
  std::deque<JournalWrite> kept;
  absl::flat_hash_set<std::string_view> keys;  // of `kept`, whose elements stay where they are
  size_t dispensable = 0;
  for (auto write = writes_.rbegin(); write != writes_.rend(); ++write) {
    if (keys.contains(write->key)) continue;
    if (write->dispensable && ++dispensable > most_) continue;
    kept.push_front(std::move(*write));
    keys.insert(kept.front().key);
  }
  writes_ = std::move(kept);
}

}  // namespace tributary::service
