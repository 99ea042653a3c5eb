// Servers at addresses that are theirs alone.
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tributary {

// Keeps other processes from listening at the same TCP port, which Linux would allow; callers would
// then reach one process or the other.
void ForbidSharedPorts(grpc::ServerBuilder* builder);

// UNAVAILABLE when another process listens at a Unix socket, INVALID_ARGUMENT when its path is too
// long; both name the address. gRPC unlinks the file before it binds, so it would take the place of
// a server that lives. The system itself protects TCP ports.
absl::Status CheckFree(const std::string& address);

// Starts the server that `builder` describes at all of `addresses`, which no other process shares.
// *bound receives the addresses with their ports filled in. UNAVAILABLE names the address that is
// in use or cannot be bound.
absl::StatusOr<std::unique_ptr<grpc::Server>> ListenAt(
    const std::vector<std::string>& addresses,
    const std::shared_ptr<grpc::ServerCredentials>& credentials, grpc::ServerBuilder* builder,
    std::vector<std::string>* bound);

// A program that links gRPC's reflection has it in every one of its servers; this option takes it
// out of one.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override;
};

}  // namespace tributary
