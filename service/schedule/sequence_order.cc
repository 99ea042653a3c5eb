#include "service/schedule/sequence_order.h"

#include <algorithm>

namespace tributary::service {
namespace {

// Whether a member that stands behind a head of the queue heads it, too.
bool StandTogether(const SequenceOrder::Member& head, const SequenceOrder::Member& member) {
  return head.session != 0 && head.session == member.session;
}

}  // namespace

bool SequenceOrder::Enter(Member* member) {
  member->blocked = 0;
  for (const worker::SequenceId id : member->sequences) {
    Queue& queue = queues_[id];
    const bool heads =
        queue.empty() || (queue.back().heads && StandTogether(*queue.back().member, *member));
    if (!heads) ++member->blocked;
    queue.push_back({member, heads});
  }
  return member->blocked == 0;
}

void SequenceOrder::Leave(Member* member, std::vector<Member*>* runnable) {
  for (const worker::SequenceId id : member->sequences) {
    const auto it = queues_.find(id);
    Queue& queue = it->second;
    queue.erase(std::find_if(queue.begin(), queue.end(),
                             [member](const Place& place) { return place.member == member; }));
    if (queue.empty()) {
      queues_.erase(it);
      continue;
    }
    for (size_t i = 0; i < queue.size(); ++i) {
      if (i > 0 && !StandTogether(*queue.front().member, *queue[i].member)) break;
      if (queue[i].heads) continue;
      queue[i].heads = true;
      if (--queue[i].member->blocked == 0) runnable->push_back(queue[i].member);
    }
  }
}

}  // namespace tributary::service
