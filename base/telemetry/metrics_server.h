// HTTP /metrics for Prometheus, over IPv4 and IPv6.
//
// One request at a time, on a thread of the server: a scrape is read, answered and closed, each
// within a bound. It serves this one page and is not a general web server.
#pragma once

#include <prometheus/collectable.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tributary::telemetry {

class MetricsServer {
 public:
  // `host` is an address, in brackets when it is of IPv6, or a name; "[::]" is every address of
  // both families. Port 0 picks one. UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& host, int port,
      std::vector<std::shared_ptr<prometheus::Collectable>> what);
  // A request that is being answered is cut off.
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const { return port_; }

 private:
  MetricsServer() = default;
  void Run() const;
  void Serve(int connection) const;
  std::string Page() const;

  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
  int listener_ = -1;
  int stop_ = -1;  // an eventfd that becomes readable when the server is to end
  int port_ = 0;
  std::thread thread_;
};

// The whole answer to a request whose head (request line and headers) is given: `page` for GET and
// HEAD of /metrics, else 404, 405 or 400.
std::string HttpAnswer(absl::string_view head, const std::function<std::string()>& page);

// The host of "host:port"; loopback when the address is empty or a Unix socket.
std::string HostOf(absl::string_view address);

}  // namespace tributary::telemetry
