#include "service/client/connect.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/rpc/channel_security.h"
#include "base/rpc/connection_failure.h"
#include "base/rpc/keepalive.h"
#include "base/status/errors.h"
#include "grpc/grpc.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/channel_arguments.h"
#include "tributary/v1/attention.grpc.pb.h"

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
// How long the reason of a failed attempt may take: a call on a channel that has just failed fails
// with it at once, unless the next attempt has begun.
constexpr std::chrono::milliseconds kReasonTimeout{1'000};

// Why the last attempt to connect failed, in words; empty when that cannot be said.
std::string WhyNotConnected(grpc::Channel& channel, const ConnectOptions& options) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kReasonTimeout);
  v1::GetTopologyReply reply;
  const auto stub = v1::AttentionService::NewStub(
      std::shared_ptr<grpc::Channel>(std::shared_ptr<void>(), &channel));  // owned by the caller
  const grpc::Status status = stub->GetTopology(&context, {}, &reply);
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  return ExplainConnectionFailure(options.target, options.security, status.error_message());
}

// gRPC ends when the last object that uses it goes, and then waits up to 10 s for a poll that a
// message left behind that was too large for the socket. A host that gives its client up is not to
// wait for that, so gRPC stays for as long as the process.
void KeepGrpc() {
  static const bool kept = (grpc_init(), true);
  (void)kept;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options) {
  KeepGrpc();
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

absl::Status AwaitConnection(grpc::Channel& channel, const ConnectOptions& options,
                             std::chrono::system_clock::time_point deadline) {
  std::string why;
  for (;;) {
    const grpc_connectivity_state state = channel.GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return absl::OkStatus();
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE && why.empty()) {
      why = WhyNotConnected(channel, options);
      if (!options.wait_for_service && !why.empty()) return absl::UnavailableError(why);
    }
    if (channel.WaitForStateChange(state, deadline)) continue;
    return absl::UnavailableError(absl::StrCat("nobody answers at ", options.target, " within ",
                                               options.timeout.count(), " ms",
                                               why.empty() ? "" : ": ", why));
  }
}

absl::Status CheckConnectOptions(const ConnectOptions& options) {
  if (options.target.empty()) return InvalidField("target", "is missing");
  if (options.timeout.count() <= 0) return InvalidField("timeout", "must be > 0");
  if (options.timeout > std::chrono::hours(24)) {
    return InvalidField("timeout", "must be 24 hours at most");
  }
  if (options.max_attempts < 0) return InvalidField("max_attempts", "must be >= 0");
  if (!options.lease.empty()) {
    const bool fits = options.lease.size() <= 128 &&
                      std::all_of(options.lease.begin(), options.lease.end(), [](char c) {
                        return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
                               c == '_' || c == '-';
                      });
    if (!fits) return InvalidField("lease", "must be 1 to 128 of [A-Za-z0-9._-]");
  }
  if (options.max_message_bytes == 0) return InvalidField("max_message_bytes", "must be > 0");
  return absl::OkStatus();
}

}  // namespace tributary::client
