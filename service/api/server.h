// The process's gRPC servers: the public server, and the admin server, which carries only health.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/keepalive.h"
#include "base/rpc/tls.h"
#include "service/access/access_control.h"
#include "service/api/byte_budget.h"
#include "service/api/stream_watch.h"
#include "service/coordinator/coordinator.h"

namespace grpc {
class Service;
}

namespace tributary::service {

struct ServerOptions {
  std::vector<std::string> listen;
  std::string admin_listen;  // empty: no admin server
  // Of Unix sockets among `listen`: who may write to one may connect.
  mode_t socket_mode = 0600;
  int max_message_bytes = 64 << 20;
  int max_calls_per_stream = 256;
  bool reflection = true;
  // For all addresses but the admin server's, which is plain text.
  TlsFiles tls;
  std::shared_ptr<AccessControl> access;  // null: whoever can connect may do everything
  // Whether callers that are not known to be on this machine may name shared memory.
  bool shared_memory_from_anywhere = false;
  int64_t max_calls_per_client = 0;    // calls in flight; 0: no limit
  int64_t max_streams_per_client = 0;  // 0: no limit
  ByteLimits bytes_in_flight;          // of messages
  StreamWatch::Options streams;
  ServerKeepalive keepalive;
  // Services that are served at the public addresses besides the API. They outlive the server.
  std::vector<grpc::Service*> more_services;
  // How long after the last answer of a drain the server stays, so that callers that come back are
  // told UNAVAILABLE.
  std::chrono::milliseconds drain_settle{500};
};

// On the admin server the health services "" and "liveness" are SERVING while the process runs, and
// "readiness" is SERVING while calls can be served.
class Server {
 public:
  // UNAVAILABLE with a sentence when an address is in use or cannot be bound, INVALID_ARGUMENT
  // naming the setting when a file of `tls` cannot be used.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       Coordinator* coordinator);
  virtual ~Server() = default;

  // The addresses as bound, with ports filled in, in the order of ServerOptions::listen.
  virtual std::vector<std::string> addresses() const = 0;
  virtual std::string admin_address() const = 0;
  virtual void SetReady(bool ready) = 0;

  // Calls and streams that one client may have in flight from now on; 0: no limit.
  virtual void SetMaxCallsPerClient(int64_t calls) = 0;
  virtual void SetMaxStreamsPerClient(int64_t streams) = 0;
  virtual ByteLimits bytes_in_flight() const = 0;
  virtual void SetBytesInFlight(const ByteLimits& limits) = 0;
  // How many streams have not ended.
  virtual size_t open_streams() const = 0;
  // Refuses new calls, waits until the deadline for accepted calls to finish, and cancels the rest.
  // True when none was cancelled. The admin server stays.
  virtual bool Drain(std::chrono::steady_clock::time_point deadline) = 0;
};

}  // namespace tributary::service
