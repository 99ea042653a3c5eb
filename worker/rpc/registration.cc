#include "worker/rpc/registration.h"

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "worker/rpc/protocol.h"

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

absl::Status CheckRegistration(const GroupFacts& group, uint64_t epoch, const v1::Registration& r) {
  if (r.protocol_version() != kProtocolVersion) {
    return RefuseOther("protocol_version", r.protocol_version(), kProtocolVersion);
  }
  if (r.build_version() != BuildVersion()) {
    return RefuseOther<absl::string_view>("build_version", r.build_version(), BuildVersion());
  }
  if (r.backend() != group.backend) {
    return RefuseOther<absl::string_view>("backend", r.backend(), group.backend);
  }
  if (r.world_size() != 0 && r.world_size() != group.size) {
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

absl::StatusOr<int> ChooseSeat(const std::vector<Seat>& seats, const v1::Registration& r) {
  const auto held_by_another = [&](const Seat& seat) {
    return seat.connected && seat.instance_id != r.instance_id();
  };
  if (r.has_rank()) {
    if (held_by_another(seats[r.rank()])) {
      return Refuse("rank", absl::StrCat("another live worker holds rank ", r.rank()));
    }
    return r.rank();
  }
  int best = -1;
  for (int rank = 0; rank < static_cast<int>(seats.size()); ++rank) {
    if (seats[rank].instance_id == r.instance_id()) return rank;
    if (held_by_another(seats[rank])) continue;
    // A seat nobody had yet was never left: 0.
    if (best < 0 || seats[rank].left < seats[best].left) best = rank;
  }
  if (best < 0) {
    return Refuse("rank", absl::StrCat("all ", seats.size(), " ranks are held by live workers"));
  }
  return best;
}

}  // namespace tributary::worker
