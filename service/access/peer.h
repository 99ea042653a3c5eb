// Who and where a caller is. `peer` is the address by which gRPC knows it
// (grpc::ServerContextBase::peer).
#pragma once

#include <sys/types.h>

#include <optional>

#include "absl/strings/string_view.h"

namespace tributary::service {

// Whether the peer came through a Unix socket or over loopback, and so is a process of this
// machine. A process of this machine that calls another of its addresses cannot be told from one
// elsewhere.
bool IsOnThisMachine(absl::string_view peer);
bool CameThroughUnixSocket(absl::string_view peer);

// The user that a caller at the service's Unix socket (api/unix_listener.h) runs as; kUnknownUser
// when the caller is gone by now. Empty for other callers.
std::optional<uid_t> UserOf(absl::string_view peer);
inline constexpr uid_t kUnknownUser = static_cast<uid_t>(-1);

}  // namespace tributary::service
