#include "worker/rpc/place_in_group.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::worker {

absl::StatusOr<std::optional<int32_t>> PlaceInGroup(const PlaceFlags& flags) {
  if (flags.rank < -1) return InvalidField("rank", "must be >= -1");
  if (flags.ranks_per_node < 0) {
    return InvalidField("ranks_per_node", "must be >= 0");
  }
  if (flags.node < 0) return InvalidField("node", "must be >= 0");
  if (flags.ranks_per_node == 0) {
    if (flags.node != 0) {
      return InvalidField("node", "counts only with --ranks_per_node");
    }
    if (flags.rank < 0) return std::nullopt;
    return flags.rank;
  }
  if (flags.rank < 0 || flags.rank >= flags.ranks_per_node) {
    return InvalidField(
        "rank", absl::StrCat("must be 0 to ", flags.ranks_per_node - 1,
                             " with --ranks_per_node=", flags.ranks_per_node, ", is ", flags.rank));
  }
  const int64_t place = int64_t{flags.node} * flags.ranks_per_node + flags.rank;
  if (place > std::numeric_limits<int32_t>::max()) {
    return InvalidField("node", absl::StrCat(flags.node, " is too large"));
  }
  return static_cast<int32_t>(place);
}

}  // namespace tributary::worker
