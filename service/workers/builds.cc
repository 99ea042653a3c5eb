#include "service/workers/builds.h"

#include "absl/strings/str_cat.h"

namespace tributary::service {

bool IsOfAnotherBuild(const Member& member, absl::string_view ours) {
  return member.connected && !member.build.empty() && member.build != ours;
}

std::string OtherBuilds(const std::vector<Member>& members, absl::string_view ours) {
  std::string others;
  for (const Member& member : members) {
    if (!IsOfAnotherBuild(member, ours)) continue;
    absl::StrAppend(&others, others.empty() ? "" : ", ", "rank ", member.rank, ": ", member.build);
  }
  return others;
}

}  // namespace tributary::service
