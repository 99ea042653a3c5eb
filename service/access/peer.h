// Who and where a caller is, by the address that gRPC knows it by: what
// grpc::ServerContextBase::peer says.
#pragma once

#include <sys/types.h>

#include <optional>

#include "absl/strings/string_view.h"

namespace tributary::service {

// Whether the peer is a process of this machine: it came through a Unix socket or over loopback. A
// process of this machine that calls another of its addresses is not told from one that is
// elsewhere.
bool IsOnThisMachine(absl::string_view peer);
bool CameThroughUnixSocket(absl::string_view peer);

// The user that a caller runs as who came through a Unix socket of the service's own
// (api/unix_listener.h); kUnknownUser of one that is gone by now. Nothing for other callers.
std::optional<uid_t> UserOf(absl::string_view peer);
inline constexpr uid_t kUnknownUser = static_cast<uid_t>(-1);

}  // namespace tributary::service
