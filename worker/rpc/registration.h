// Who may join a group, and at which place: pure functions of what both ends state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tributary/v1/worker.pb.h"

namespace tributary::worker {

// What the coordinator compares a registration with.
struct GroupFacts {
  int size = 1;           // N
  uint64_t group_id = 0;  // of this life of the coordinator
  uint64_t epoch = 0;     // the last one given out
  std::string backend;
};

// kFailedPrecondition with the field (base/status/errors.h); worker.proto lists the reasons.
// `epoch` is WorkerMessage.epoch.
absl::Status CheckRegistration(const GroupFacts& group, uint64_t epoch,
                               const v1::Registration& registration);

// A rank's place.
struct RankHistory {
  uint64_t instance_id = 0;  // who has or had it last; 0: nobody yet
  bool connected = false;
  uint64_t left = 0;  // rises from one leaving to the next
};

// The rank for a registration that passed the check. An instance gets its own rank back. Otherwise
// the rank it asks for, unless another live instance has it. Otherwise a rank nobody had yet, or
// the one left first: its holder is the least likely to come back with the shard.
absl::StatusOr<int> ChooseRank(const std::vector<RankHistory>& ranks,
                               const v1::Registration& registration);

}  // namespace tributary::worker
