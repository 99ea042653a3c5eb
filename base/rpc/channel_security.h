// Channels with TLS and bearer tokens, for the processes that dial: workers, hosts and the command
// line.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/rpc/security_options.h"

namespace tributary {

// A channel to `target`. INVALID_ARGUMENT naming the field ("tls_ca", "tls_cert", "tls_key",
// "tls_server_name", "token_file") when a file cannot be used, or when a token would travel in
// plain text beyond this machine. Connecting is the channel's own business.
absl::StatusOr<std::shared_ptr<grpc::Channel>> DialSecurely(
    const std::string& target, const ChannelSecurity& security,
    const grpc::ChannelArguments& arguments);

}  // namespace tributary
