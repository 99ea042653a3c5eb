// The addresses of a service that has several groups of workers.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/security_options.h"

namespace tributary::client {

// Whether a target names several groups: "host:port,host:port" or "groups:name:port".
bool NamesGroups(absl::string_view target);

// What a target that names groups says.
struct GroupTargets {
  std::vector<std::string> fixed;  // one address for each group
  std::string name, port;          // or a name, each of whose addresses is a group
};
// INVALID_ARGUMENT naming "target".
absl::StatusOr<GroupTargets> ParseGroupTargets(absl::string_view target);

// The addresses that a name has now, as gRPC targets, in order and each once. Asks the system's
// resolver, which may take seconds. UNAVAILABLE says why there are none.
absl::StatusOr<std::vector<std::string>> ResolveGroups(const std::string& name,
                                                       const std::string& port);

// The name in "groups:name:port", which the certificates of all its groups have; otherwise empty.
std::string NameOfGroups(absl::string_view target);
// Each group of a name has that name in its certificate, and not its own address: TLS is to ask for
// it, unless the caller asks for another one. An empty name asks for nothing.
void NameServer(const std::string& name, ChannelSecurity* security);
// The addresses of the groups that a target names, now; the target itself when it names one
// service.
absl::StatusOr<std::vector<std::string>> GroupsOf(absl::string_view target);

}  // namespace tributary::client
