#include "worker/rpc/registration.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::worker {
namespace {

absl::Status Refuse(absl::string_view field, absl::string_view message) {
  return FieldError(absl::StatusCode::kFailedPrecondition, field, message);
}

template <typename T>
absl::Status RefuseOther(absl::string_view field, const T& theirs, const T& ours) {
  return Refuse(field, absl::StrCat("the worker's is ", theirs, ", the coordinator's is ", ours));
}

}  // namespace

ProtocolRange SpokenBy(const v1::Registration& registration) {
  const uint32_t current = registration.protocol_version();
  const uint32_t minimum = registration.minimum_protocol_version();
  return {.minimum = minimum == 0 ? current : minimum, .current = current};
}

absl::Status CheckRegistration(const GroupFacts& group, uint64_t epoch, const v1::Registration& r) {
  const ProtocolRange theirs = SpokenBy(r), ours = SpokenProtocol();
  if (!CommonProtocol(theirs, ours).has_value()) {
    return Refuse("protocol_version",
                  absl::StrCat("the worker speaks ", theirs.minimum, " to ", theirs.current,
                               ", the coordinator ", ours.minimum, " to ", ours.current));
  }
  if (r.backend() != group.backend) {
    return RefuseOther<absl::string_view>("backend", r.backend(), group.backend);
  }
  const auto& others = group.other_sizes;
  const bool meant = r.world_size() == 0 || r.world_size() == group.size ||
                     std::find(others.begin(), others.end(), r.world_size()) != others.end();
  if (!meant) {
    return RefuseOther("world_size", r.world_size(), group.size);
  }
  if (r.has_rank() && (r.rank() < 0 || r.rank() >= group.size)) {
    return Refuse("rank", absl::StrCat(r.rank(), " is not in 0 .. ", group.size - 1));
  }
  if (r.instance_id() == 0) return Refuse("instance_id", "must not be 0");
  if (r.group_id() != 0 && r.group_id() != group.group_id) {
    return Refuse("epoch", absl::StrCat("epoch ", epoch, " is of another life of the coordinator"));
  }
  if (epoch > group.epoch) {
    return Refuse("epoch",
                  absl::StrCat("epoch ", epoch, " is ahead of the coordinator's, ", group.epoch));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> ChooseRank(const std::vector<RankHistory>& ranks, const v1::Registration& r) {
  const auto held_by_another = [&](const RankHistory& held) {
    return held.connected && held.instance_id != r.instance_id();
  };
  if (r.has_rank()) {
    if (held_by_another(ranks[r.rank()])) {
      return Refuse("rank", absl::StrCat("another live worker holds rank ", r.rank()));
    }
    return r.rank();
  }
  int best = -1;
  bool awaited = false;
  const auto order = [&](int rank) {
    return std::pair(ranks[rank].instance_id != 0, ranks[rank].left);
  };
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (ranks[rank].instance_id == r.instance_id()) return rank;
    if (held_by_another(ranks[rank])) continue;
    awaited |= ranks[rank].awaited;
    if (ranks[rank].awaited) continue;
    if (best < 0 || order(rank) < order(best)) best = rank;
  }
  if (best < 0) {
    return Refuse("rank", absl::StrCat("all ", ranks.size(), " ranks are held by live workers",
                                       awaited ? ", or kept for a while for those that held them "
                                                 "before the coordinator was started again"
                                               : ""));
  }
  return best;
}

}  // namespace tributary::worker
