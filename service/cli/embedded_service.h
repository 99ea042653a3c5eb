// A whole service in this process: coordinator, worker threads and the gRPC front on a Unix socket
// that nobody else can reach. A host talks to it as to any other.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "service/api/server.h"
#include "service/coordinator/coordinator.h"
#include "worker/backends.h"
#include "worker/exchange_choice.h"

namespace tributary::cli {

struct EmbeddedServiceOptions {
  int workers = 4;
  int threads = 0;  // of all workers together; 0: as many as the machine has
  worker::Device device = worker::Device::kCpu;  // with GPUs, worker r has GPU r
  worker::ExchangePlace exchange_place = worker::ExchangePlace::kHost;
};

class EmbeddedService {
 public:
  static absl::StatusOr<std::unique_ptr<EmbeddedService>> Start(
      const EmbeddedServiceOptions& options);
  // Lets calls in flight finish, for a few seconds.
  ~EmbeddedService();
  EmbeddedService(const EmbeddedService&) = delete;
  EmbeddedService& operator=(const EmbeddedService&) = delete;

  std::string target() const { return "unix:" + (directory_ / "socket").string(); }

 private:
  explicit EmbeddedService(std::filesystem::path directory) : directory_(std::move(directory)) {}

  const std::filesystem::path directory_;
  std::unique_ptr<service::Coordinator> coordinator_;
  std::unique_ptr<service::Server> server_;
};

}  // namespace tributary::cli
