// Calls of AttendAsync that several groups answer, by the number that Cancel is given.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/sync/mutex.h"
#include "service/client/groups/group_table.h"

namespace tributary::client {

// Shared by the clients that WithTimeout makes of one. Thread safe.
class AttendsInFlight {
 public:
  // Where a part of a call is, and its number there.
  struct Part {
    GroupTable::GroupPtr group;
    uint64_t call = 0;
  };

  // A number for a call that is about to be sent: not 0.
  uint64_t Begin();
  // A part of the call has been sent. It is cancelled at once when the call has been; nothing comes
  // of it when the call is over.
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
