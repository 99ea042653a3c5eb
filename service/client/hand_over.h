// How memory of this process gets to a service at a Unix socket, which maps it when it is
// registered.
#pragma once

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary::client {

// Hands over the descriptor of a memfd, and returns the secret under which the service keeps it for
// a few seconds. `service_path` is the path of the service's Unix socket. UNAVAILABLE: nobody takes
// memory beside it. DEADLINE_EXCEEDED: the service did not answer in time.
absl::StatusOr<std::string> HandOver(absl::string_view service_path, int memory,
                                     std::chrono::steady_clock::time_point deadline);

}  // namespace tributary::client
