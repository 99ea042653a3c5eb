// Addresses at which a program of ours listens are its alone.
#pragma once

#include <grpcpp/server_builder.h>

#include <string>

#include "absl/status/status.h"

namespace tributary {

// Several processes would otherwise share a TCP port, and callers reach one or the other.
void ForbidSharedPorts(grpc::ServerBuilder* builder);

// UNAVAILABLE when another process listens at a Unix socket, INVALID_ARGUMENT when its path is too
// long; both name the address. gRPC unlinks the file before it binds, so it would take the place of
// a server that lives. Of TCP ports the system takes care.
absl::Status CheckFree(const std::string& address);

}  // namespace tributary
