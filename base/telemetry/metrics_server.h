// HTTP /metrics for Prometheus.
#pragma once

#include <prometheus/collectable.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace prometheus {
class Exposer;
}

namespace tributary::telemetry {

class MetricsServer {
 public:
  // Port 0 picks one. UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& host, int port,
      std::vector<std::shared_ptr<prometheus::Collectable>> what);
  ~MetricsServer();

  int port() const;

 private:
  MetricsServer();

  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
  std::unique_ptr<prometheus::Exposer> exposer_;  // goes first
};

// The host of "host:port"; loopback when the address is empty or a Unix socket.
std::string HostOf(absl::string_view address);

}  // namespace tributary::telemetry
