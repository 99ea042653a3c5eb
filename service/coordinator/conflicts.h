// Repeated tokens that are not those which a sequence holds.
#pragma once

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "base/status/rpc_errors.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

// The entries of a command whose repeated tokens differ on some rank.
inline absl::flat_hash_set<int32_t> ConflictsOf(const Outcome& outcome) {
  absl::flat_hash_set<int32_t> conflicts;
  for (const worker::Reply& reply : outcome.replies) {
    conflicts.insert(reply.conflicts.begin(), reply.conflicts.end());
  }
  return conflicts;
}

// ALREADY_EXISTS for entry number `entry` of a call or of a session's step.
inline absl::Status OtherTokensHeld(int entry) {
  return Conflict(EntryField(entry, "first_position"),
                  "other K/V are held at these positions; truncate the sequence to replace them");
}

}  // namespace tributary::service
