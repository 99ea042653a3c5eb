// Calls of one sequence take effect in the order sent, one at a time; calls of different sequences
// do not wait for each other.
//
// An operation stands in the queue of each of its sequences and may run once it heads all of them.
// Operations enter all their queues at once, so there is one order of arrival and no cycle of
// waiting.
//
// Not thread safe.
#pragma once

#include <deque>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "worker/command.h"

namespace tributary::service {

class SequenceOrder {
 public:
  struct Member {
    std::vector<worker::SequenceId> sequences;  // each at most once
    int blocked = 0;                            // queues it does not head yet
  };

  // True when the member may run at once.
  bool Enter(Member* member);
  // Takes a member out, whether it ran or gave up waiting. Adds those that may run now.
  void Leave(Member* member, std::vector<Member*>* runnable);

  bool empty() const { return queues_.empty(); }

 private:
  absl::flat_hash_map<worker::SequenceId, std::deque<Member*>> queues_;  // none is empty
};

}  // namespace tributary::service
