// The place of a worker process in its group, where several of them run on one node.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"

namespace tributary::worker {

// What the flags of the same names say.
struct PlaceFlags {
  int rank = -1;           // -1: any place is taken
  int ranks_per_node = 0;  // 0: `rank` is the place in the group
  int node = 0;            // the node's index, from 0
};

// The place to ask for; nothing where any will do. With ranks_per_node = K, node n has the places
// n * K to n * K + K - 1, and `rank` counts among those: an orchestrator knows a pod's index and a
// container's, but cannot multiply. kInvalidArgument names the flag at fault.
absl::StatusOr<std::optional<int32_t>> PlaceInGroup(const PlaceFlags& flags);

}  // namespace tributary::worker
