// Who may join a group, and at which place: pure functions of what both ends state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tributary/v1/worker.pb.h"
#include "worker/rpc/protocol.h"

namespace tributary::worker {

// What the coordinator compares a registration with.
struct GroupFacts {
  int size = 1;  // N: the ranks that there are
  // Other numbers of ranks that workers may be meant for: that of a group that is about to change.
  std::vector<int> other_sizes = {};
  uint64_t group_id = 0;  // of this life of the coordinator
  uint64_t epoch = 0;     // the last one given out
  std::string backend;
};

// The versions of the protocol that the worker speaks.
ProtocolRange SpokenBy(const v1::Registration& registration);

// kFailedPrecondition with the field (base/status/errors.h); worker.proto lists the reasons.
// `epoch` is WorkerMessage.epoch.
absl::Status CheckRegistration(const GroupFacts& group, uint64_t epoch,
                               const v1::Registration& registration);

// Who holds a rank, or held it last.
struct RankHistory {
  uint64_t instance_id = 0;  // 0: no instance has held the rank yet
  bool connected = false;
  uint64_t left = 0;  // when it left: rises from one leaving to the next
  // The instance held the rank in an earlier life of the coordinator, and may be on its way here
  // with what it holds.
  bool awaited = false;
};

// The rank for a registration that passed the check. An instance that asks for a rank gets it, and
// is refused when another live instance holds it. An instance that asks for none gets its own rank
// back, or else a rank that nobody has held yet, or else the one that was left first, because its
// holder is the least likely to come back with the shard. It gets no rank whose holder is awaited:
// there are as many live workers as ranks, perhaps, and each would drop its shard for another's
// rank. `ranks` has one element per rank.
absl::StatusOr<int> ChooseRank(const std::vector<RankHistory>& ranks,
                               const v1::Registration& registration);

}  // namespace tributary::worker
