// Groups whose workers are of several builds, as they are while a service is upgraded.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "service/workers/worker_group.h"

namespace tributary::service {

// Whether a rank's worker is connected and of another build than `ours`.
bool IsOfAnotherBuild(const Member& member, absl::string_view ours);

// The ranks for which that holds, with their builds: "rank 0: 0.1.0-g12, rank 2: 0.2.0-g34". Empty
// when there are none.
std::string OtherBuilds(const std::vector<Member>& members, absl::string_view ours);

}  // namespace tributary::service
