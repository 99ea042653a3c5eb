#include "service/client/connect.h"

#include <algorithm>
#include <chrono>

#include "base/rpc/channel_security.h"
#include "base/rpc/keepalive.h"
#include "base/status/errors.h"
#include "grpcpp/support/channel_arguments.h"

namespace tributary::client {
namespace {

// Room in a message for what is not a tensor: entries and names.
constexpr size_t kMessageSlack = size_t{1} << 20;
// How soon a broken connection is made anew; gRPC's own defaults (1 s to 2 min) are longer than
// most callers wait.
constexpr int kReconnectMs = 50;
constexpr int kMostReconnectMs = 1'000;
// How long one attempt may take until the server has spoken, a TLS handshake included. gRPC calls
// it the least back-off; it does not delay the next attempt.
constexpr int kConnectTimeoutMs = 10'000;

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options) {
  grpc::ChannelArguments arguments;
  SetClientKeepalive(arguments);
  const int limit = static_cast<int>(
      std::min<size_t>(options.max_message_bytes, INT32_MAX - kMessageSlack) + kMessageSlack);
  arguments.SetMaxReceiveMessageSize(limit);
  arguments.SetMaxSendMessageSize(limit);
  // One policy of repeating, and it is ours: gRPC's would not know which calls are safe.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMostReconnectMs);
  // Two clients of one process have a connection each.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return DialSecurely(options.target, options.security, arguments);
}

absl::Status CheckConnectOptions(const ConnectOptions& options) {
  if (options.target.empty()) return InvalidField("target", "is missing");
  if (options.timeout.count() <= 0) return InvalidField("timeout", "must be > 0");
  if (options.timeout > std::chrono::hours(24)) {
    return InvalidField("timeout", "must be 24 hours at most");
  }
  if (options.max_attempts < 1) return InvalidField("max_attempts", "must be >= 1");
  if (options.max_message_bytes == 0) return InvalidField("max_message_bytes", "must be > 0");
  return absl::OkStatus();
}

}  // namespace tributary::client
