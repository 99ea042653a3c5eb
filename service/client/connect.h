// The channel to a service.
#pragma once

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/client/client.h"

namespace tributary::client {

// INVALID_ARGUMENT naming a field of the options.
absl::Status CheckConnectOptions(const ConnectOptions& options);

// A channel with a connection of its own, which is made when it is first used.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options);

// Until the channel has connected. UNAVAILABLE says why it has not: at the deadline, or after the
// first attempt where the options do not ask to wait.
absl::Status AwaitConnection(grpc::Channel& channel, const ConnectOptions& options,
                             std::chrono::system_clock::time_point deadline);

}  // namespace tributary::client
