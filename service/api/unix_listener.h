// A Unix socket of the service, where it accepts connections itself and hands them to gRPC.
//
// gRPC can listen at a Unix socket, too, but then nobody learns who is at the other end. Here the
// socket has a stated mode, and a call's peer is "fd:N", by which the system says which user the
// caller runs as (access/peer.h). gRPC closes N when the connection ends, and may run a call of the
// connection after that. By then N must not be another caller's connection. So a number is used
// again only after thousands of others.
#pragma once

#include <grpcpp/server.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"

namespace tributary::service {

class UnixListener {
 public:
  // Takes the path in this mode; nobody may be listening there. Nobody can connect before Serve.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Bind(absl::string_view path, mode_t mode);
  // Stops, and gives up the path.
  ~UnixListener();
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  // Accepts connections for `server` from now on, on a thread of its own. The server outlives this,
  // and is not shut down before this is gone.
  absl::Status Serve(grpc::Server* server);

  const std::string& path() const { return path_; }

 private:
  UnixListener(std::string path, Descriptor listener, Descriptor wake)
      : path_(std::move(path)), listener_(std::move(listener)), wake_(std::move(wake)) {}

  void Run();
  void Accept();
  // Gives the connection the next number.
  Descriptor Renumber(Descriptor connection);

  const std::string path_;
  const Descriptor listener_;
  const Descriptor wake_;  // an eventfd that tells the thread to end
  grpc::Server* server_ = nullptr;
  int next_number_ = 0;  // used by the thread alone
  std::thread thread_;
};

}  // namespace tributary::service
