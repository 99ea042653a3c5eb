// Keepalive of the connections between hosts and the coordinator: both ends in one place, because a
// client that pings more often than its server allows is disconnected ("too_many_pings") and loses
// the calls it has in flight.
#pragma once

#include "grpc/impl/codegen/grpc_types.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/support/channel_arguments.h"

namespace tributary {

// A peer that vanished without closing its connection is noticed after interval + timeout.
inline constexpr int kKeepaliveIntervalMs = 20'000;
inline constexpr int kKeepaliveTimeoutMs = 10'000;
// What the server tolerates; below the interval, so that a ping that arrives early is no offence.
inline constexpr int kKeepaliveLeastIntervalMs = 10'000;

// The server's end. A client that does not answer is gone: its connection and its calls end.
struct ServerKeepalive {
  int interval_ms = kKeepaliveIntervalMs;
  int timeout_ms = kKeepaliveTimeoutMs;
  int least_interval_ms = kKeepaliveLeastIntervalMs;  // of the client's pings
};

inline void SetClientKeepalive(grpc::ChannelArguments& arguments) {
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveIntervalMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  // A host may think for long between two calls; its connection stays.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

inline void SetServerKeepalive(grpc::ServerBuilder& builder, const ServerKeepalive& keepalive) {
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive.interval_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive.timeout_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // gRPC would stop asking a connection without traffic after two pings.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             keepalive.least_interval_ms);
}

}  // namespace tributary
