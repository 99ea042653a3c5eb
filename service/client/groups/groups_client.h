// A client of a service with several groups of workers.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "service/client/client.h"
#include "service/client/groups/group_table.h"

namespace tributary::client {

// What Client::Connect returns for a target that names groups. A cache is created in all groups; a
// call goes to the groups of its sequences, each its own part, all at once. It fails with the first
// error of a part, by group; the other parts are done all the same, and repeating the call is safe.
absl::StatusOr<std::unique_ptr<Client>> ConnectToGroups(const GroupTableOptions& options);

}  // namespace tributary::client
