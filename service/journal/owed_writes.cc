#include "service/journal/owed_writes.h"

namespace tributary::service {

void OwedWrites::Add(const std::deque<JournalWrite>& failed) {
  for (const JournalWrite& write : failed) {
    if (write.key.empty()) continue;
    if (const auto before = of_key_.find(write.key); before != of_key_.end()) {
      Remove(before->second);
    }
    const uint64_t number = next_++;
    JournalWrite& owed = writes_[number];
    owed = write;
    owed.done = nullptr;  // has been told
    of_key_[write.key] = number;
    if (write.dispensable) dispensable_.insert(number);
    if (dispensable_.size() > most_) Remove(*dispensable_.begin());
  }
}

void OwedWrites::Remove(uint64_t number) {
  const auto write = writes_.find(number);
  of_key_.erase(write->second.key);
  dispensable_.erase(number);
  writes_.erase(write);
}

void OwedWrites::Clear() {
  writes_.clear();
  of_key_.clear();
  dispensable_.clear();
}

}  // namespace tributary::service
