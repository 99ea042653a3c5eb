// Many opens, forks, truncations and closes of one cache's sequences, all of them or none.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "service/schedule/client_quota.h"
#include "service/schedule/sequence_table.h"

namespace tributary::service {

struct SequenceUpdate {
  enum class Kind { kOpen, kFork, kTruncate, kClose };
  Kind kind = Kind::kOpen;
  SequenceId sequence = 0;  // 0, of an open or a fork: the table chooses
  SequenceId parent = 0;    // of a fork
  int64_t length = -1;      // of a truncation; of a fork, where -1 is all that every layer holds
};

struct UpdatedSequences {
  struct State {
    SequenceId sequence = 0;
    int64_t length = 0;  // the least over its layers; 0 of a closed one
  };
  std::vector<State> states;  // one per update, as each left its sequence
  // What the workers must be told: first that tables of `closed` are dropped, then the tables of
  // `forked` as they are in the end. Sequences may be in both. Each is named once in each.
  std::vector<SequenceId> closed;
  std::vector<SequenceId> forked;
};

// Applies updates in order. The first that is refused is named, "updates[i].*", and then nothing
// has changed. `owner` pays for sequences that are opened and forked. The sequences that updates
// name must not take part in a reservation that is not settled. The cost is that of the pages that
// those sequences hold.
absl::StatusOr<UpdatedSequences> ApplyUpdates(const std::vector<SequenceUpdate>& updates,
                                              const ClientAccountPtr& owner, SequenceTable* table);

}  // namespace tributary::service
