// Where a caller is, by the address that gRPC knows it by.
#pragma once

#include "absl/strings/string_view.h"

namespace tributary::service {

// Whether the peer is a process of this machine: it came through a Unix socket or over loopback.
// `peer` is what grpc::ServerContextBase::peer says. A process of this machine that calls another
// of its addresses is not told from one that is elsewhere.
bool IsOnThisMachine(absl::string_view peer);

}  // namespace tributary::service
