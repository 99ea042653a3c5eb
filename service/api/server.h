// The process's gRPC servers: the public one, and the admin one that carries only health.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/keepalive.h"
#include "base/rpc/tls.h"
#include "service/access/access_control.h"
#include "service/coordinator/coordinator.h"

namespace grpc {
class Service;
}

namespace tributary::service {

struct ServerOptions {
  std::vector<std::string> listen;
  std::string admin_listen;  // empty: no admin server
  int max_message_bytes = 64 << 20;
  int max_calls_per_stream = 256;
  bool reflection = true;
  // Of all addresses but the admin server's, which carries health only and is plain text.
  TlsFiles tls;
  std::shared_ptr<AccessControl> access;  // null: whoever can connect may do everything
  int64_t max_calls_per_client = 0;       // in flight; 0: no limit
  ServerKeepalive keepalive;
  // At the public addresses, besides the API; they outlive the server.
  std::vector<grpc::Service*> more_services;
  // Between the last answer of a drain and the end: callers that come back are told UNAVAILABLE.
  std::chrono::milliseconds drain_settle{500};
};

// Health of the admin server: "" and "liveness" serve while the process does; "readiness" while
// calls can be.
class Server {
 public:
  // UNAVAILABLE with a sentence when an address is in use or cannot be bound, INVALID_ARGUMENT
  // naming the setting when a file of `tls` cannot be used.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       Coordinator* coordinator);
  virtual ~Server() = default;

  // Addresses as bound, ports filled in, in the order of ServerOptions::listen.
  virtual std::vector<std::string> addresses() const = 0;
  virtual std::string admin_address() const = 0;
  virtual void SetReady(bool ready) = 0;
  // Streams of calls that have not ended.
  virtual size_t open_streams() const = 0;
  // Refuses new calls, lets accepted ones finish until the deadline, and cancels the rest. True
  // when none was cancelled. The admin server stays.
  virtual bool Drain(std::chrono::steady_clock::time_point deadline) = 0;
};

}  // namespace tributary::service
