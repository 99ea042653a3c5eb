#include "service/client/groups/attends_in_flight.h"

#include <utility>

namespace tributary::client {

uint64_t AttendsInFlight::Begin() {
  const MutexLock lock(mutex_);
  calls_[++last_];
  return last_;
}

void AttendsInFlight::Sent(uint64_t id, Part part) {
  {
    const MutexLock lock(mutex_);
    const auto call = calls_.find(id);
    if (call == calls_.end()) return;
    if (!call->second.cancelled) {
      call->second.parts.push_back(std::move(part));
      return;
    }
  }
  part.group->client->Cancel(part.call);
}

void AttendsInFlight::End(uint64_t id) {
  const MutexLock lock(mutex_);
  calls_.erase(id);
}

void AttendsInFlight::Cancel(uint64_t id) {
  std::vector<Part> parts;
  {
    const MutexLock lock(mutex_);
    const auto call = calls_.find(id);
    if (call == calls_.end()) return;
    call->second.cancelled = true;
    parts = std::move(call->second.parts);
    call->second.parts.clear();
  }
  for (const Part& part : parts) part.group->client->Cancel(part.call);
}

}  // namespace tributary::client
