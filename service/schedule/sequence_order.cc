#include "service/schedule/sequence_order.h"

#include <algorithm>

namespace tributary::service {

bool SequenceOrder::Enter(Member* member) {
  member->blocked = 0;
  for (const worker::SequenceId id : member->sequences) {
    std::deque<Member*>& queue = queues_[id];
    if (!queue.empty()) ++member->blocked;
    queue.push_back(member);
  }
  return member->blocked == 0;
}

void SequenceOrder::Leave(Member* member, std::vector<Member*>* runnable) {
  for (const worker::SequenceId id : member->sequences) {
    const auto it = queues_.find(id);
    std::deque<Member*>& queue = it->second;
    const bool headed = queue.front() == member;
    queue.erase(std::find(queue.begin(), queue.end(), member));
    if (queue.empty()) {
      queues_.erase(it);
    } else if (headed && --queue.front()->blocked == 0) {
      runnable->push_back(queue.front());
    }
  }
}

}  // namespace tributary::service
