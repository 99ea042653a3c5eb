// A Unix socket of the service, where it accepts connections itself and hands them to gRPC.
//
// gRPC can listen at a Unix socket, too, but then nobody learns who is at the other end. Here the
// socket has a stated mode, and a call's peer is "fd:N", by which the system says as which user the
// caller runs (access/peer.h). gRPC closes N when the connection ends, and may run a call after
// that. So that N does not mean somebody else by then, numbers of connections go round: one is used
// again when thousands of others have been.
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
  // Takes the path, where nobody may be listening, in this mode. Nobody can connect before Serve.
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
  // The same connection under the next number.
  Descriptor Renumber(Descriptor connection);

  const std::string path_;
  const Descriptor listener_;
  const Descriptor wake_;  // an eventfd: the thread is to end
  grpc::Server* server_ = nullptr;
  int next_number_ = 0;  // of the thread
  std::thread thread_;
};

}  // namespace tributary::service
