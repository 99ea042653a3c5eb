// Calls of AttendAsync in flight, by the numbers that Cancel takes. Several groups may answer one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/sync/mutex.h"
#include "service/client/groups/group_table.h"

namespace tributary::client {

// A client and those that WithTimeout makes of it share one of these. Thread safe.
class AttendsInFlight {
 public:
  // Where a part of a call is, and its number there.
  struct Part {
    GroupTable::GroupPtr group;
    uint64_t call = 0;
  };

  // Returns a number, not 0, for a call that is about to be sent.
  uint64_t Begin();
  // Notes that a part of the call has been sent. Where the call has been cancelled meanwhile, the
  // part is cancelled at once; where the call is over, nothing happens.
  void Sent(uint64_t id, Part part);
  void End(uint64_t id);
  // Cancels the parts of the call, those that were sent and those that will be.
  void Cancel(uint64_t id);

 private:
  struct Call {
    std::vector<Part> parts;
    bool cancelled = false;
  };

  Mutex mutex_;
  uint64_t last_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<uint64_t, Call> calls_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace tributary::client
