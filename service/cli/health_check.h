// Asks a grpc.health.v1 server.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"

namespace tributary::cli {

// Whether `service` is SERVING. NOT_FOUND when the server knows no such service.
absl::StatusOr<bool> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                 const std::string& service, std::chrono::milliseconds timeout);

}  // namespace tributary::cli
