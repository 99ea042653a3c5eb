// How a process proves itself to a server and whom it believes: TLS and bearer tokens for what
// dials (workers, hosts, the command line).
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/rpc/tls.h"

namespace tributary {

struct ChannelSecurity {
  // `authorities` set: TLS, and the server's certificate must be signed by one of them and name the
  // host dialled. Own certificate and key: shown to servers that ask (mTLS). All empty: plain text.
  TlsFiles tls;
  // The file's first line is sent with every call as "authorization: Bearer <line>"; it is read
  // again when it changes. Empty: nothing is sent.
  std::string token_file;
};

// A channel to `target`. INVALID_ARGUMENT naming the field ("tls_ca", "tls_cert", "tls_key",
// "token_file") when a file cannot be used, or when a token would travel in plain text beyond this
// machine. Connecting is the channel's own business.
absl::StatusOr<std::shared_ptr<grpc::Channel>> DialSecurely(
    const std::string& target, const ChannelSecurity& security,
    const grpc::ChannelArguments& arguments);

}  // namespace tributary
