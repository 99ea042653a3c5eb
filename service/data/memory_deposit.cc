#include "service/data/memory_deposit.h"

#include <algorithm>
#include <utility>

namespace tributary::service {

void MemoryDeposit::DropExpired(Clock::time_point now) {
  while (!waiting_.empty() && waiting_.front().until < now) waiting_.pop_front();
}

bool MemoryDeposit::Put(std::string secret, Descriptor memory, uid_t user, Clock::time_point now) {
  const MutexLock lock(mutex_);
  DropExpired(now);
  const auto of_user = [user](const Waiting& waiting) { return waiting.user == user; };
  if (std::count_if(waiting_.begin(), waiting_.end(), of_user) >=
      static_cast<std::ptrdiff_t>(kMostOfUser)) {
    waiting_.erase(std::find_if(waiting_.begin(), waiting_.end(), of_user));
  }
  if (waiting_.size() >= kMost) return false;
  waiting_.push_back({std::move(secret), std::move(memory), user, now + kGoodFor});
  return true;
}

Descriptor MemoryDeposit::Take(absl::string_view secret, Clock::time_point now) {
  const MutexLock lock(mutex_);
  DropExpired(now);
  const auto found =
      std::find_if(waiting_.begin(), waiting_.end(),
                   [secret](const Waiting& waiting) { return waiting.secret == secret; });
  if (found == waiting_.end()) return Descriptor();
  Descriptor memory = std::move(found->memory);
  waiting_.erase(found);
  return memory;
}

}  // namespace tributary::service
