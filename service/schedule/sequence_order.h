// The queues of calls at sequences. Calls of one sequence take effect one at a time, in the order
// in which they were sent. Calls of different sequences do not wait for each other.
//
// A member stands in the queue of each of its sequences and may run once it heads all of them. It
// enters all of its queues at once, so there is one order of arrival and no cycle of waiting. Steps
// of one session are carried out in order anyway: members of one session that stand together at the
// head of a queue all count as its head.
//
// Each cache has one, which CallOrder uses under the coordinator's lock. Not thread safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "worker/command.h"

namespace tributary::service {

class SequenceOrder {
 public:
  struct Member {
    absl::InlinedVector<worker::SequenceId, 2> sequences;  // each at most once
    uint64_t session = 0;                                  // 0: of none
    int blocked = 0;  // queues of its sequences that it does not head yet
  };

  // True when the member may run at once.
  bool Enter(Member* member);
  // Takes out a member that ran or gave up waiting. Adds the members that may run now to
  // `runnable`.
  void Leave(Member* member, std::vector<Member*>* runnable);

  bool empty() const { return queues_.empty(); }

 private:
  struct Place {
    Member* member = nullptr;
    bool heads = false;
  };
  // Most sequences have one call at a time.
  using Queue = absl::InlinedVector<Place, 2>;
  absl::flat_hash_map<worker::SequenceId, Queue> queues_;  // none is empty
};

}  // namespace tributary::service
