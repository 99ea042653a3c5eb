// A whole service in this process: coordinator, worker threads and the gRPC front on a private Unix
// socket. A host talks to it as to any other.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/coordinator.h"
#include "service/server.h"

namespace tributary::tinylm {

class EmbeddedService {
 public:
  // Ready to serve when it returns. `workers` CPU ranks share the machine's threads.
  static absl::StatusOr<std::unique_ptr<EmbeddedService>> Start(int workers);
  ~EmbeddedService();
  EmbeddedService(const EmbeddedService&) = delete;
  EmbeddedService& operator=(const EmbeddedService&) = delete;

  std::string target() const { return "unix:" + (folder_ / "socket").string(); }

 private:
  explicit EmbeddedService(std::filesystem::path folder);

  const std::filesystem::path folder_;  // of the socket; nobody else may enter
  std::unique_ptr<service::Coordinator> coordinator_;
  std::unique_ptr<service::Server> server_;
};

}  // namespace tributary::tinylm
