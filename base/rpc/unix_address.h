// Addresses of Unix sockets, as gRPC writes them.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary {

// The path in "unix:PATH" or "unix:///PATH"; empty for every other address.
absl::string_view UnixPath(absl::string_view address);

// A stream socket that is connected to a path, in the mode of `flags` (SOCK_NONBLOCK or 0). The
// caller closes it. INVALID_ARGUMENT: the path is too long. UNAVAILABLE: nobody listens there.
absl::StatusOr<int> ConnectToUnix(absl::string_view path, int flags);
// The same, not blocking, once the listener has room for one more connection. DEADLINE_EXCEEDED
// when it has none until then.
absl::StatusOr<int> ConnectToUnixBy(absl::string_view path,
                                    std::chrono::steady_clock::time_point deadline);
// A stream socket that is bound to a path that does not exist, likewise.
absl::StatusOr<int> BindToUnix(absl::string_view path, int flags);

// The user that the process at the other end of a connected Unix socket ran as when it connected.
// Empty when the descriptor is not such a socket.
std::optional<uid_t> UserAt(int connection);

// The path of the companion socket, over which hosts and a service at the Unix socket `path` pass
// descriptors. It lies beside `path` and has its name with the ending ".mailbox".
std::string CompanionSocketOf(absl::string_view path);

}  // namespace tributary
