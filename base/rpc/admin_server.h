// The admin server of a program: grpc.health.v1 and nothing else, for orchestrators.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/rpc/keepalive.h"

namespace tributary {

// Speaks plain text, because the probes of orchestrators know neither TLS nor credentials. The
// services "" and "liveness" are serving while the server lives; "readiness" is what SetReady said
// last, and not serving before.
class AdminServer {
 public:
  // Listens at `address`, "host:port". UNAVAILABLE with a sentence when it is in use or cannot be
  // bound.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const std::string& address,
                                                            const ServerKeepalive& keepalive = {});
  // Ends calls that are open.
  ~AdminServer();
  AdminServer(const AdminServer&) = delete;
  AdminServer& operator=(const AdminServer&) = delete;

  // The address as bound, with its port filled in.
  const std::string& address() const { return address_; }
  // Of that address; 0 for a Unix socket.
  int port() const;
  // From any thread.
  void SetReady(bool ready);

 private:
  AdminServer() = default;

  // A server with nothing but the health service has no threads: gRPC adds that service too late to
  // count it. This one counts, and answers UNIMPLEMENTED to everything else.
  grpc::CallbackGenericService others_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace tributary
