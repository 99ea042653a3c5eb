#include "base/telemetry/metrics_server.h"

#include <prometheus/exposer.h>

#include <exception>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tributary::telemetry {

MetricsServer::MetricsServer() = default;
MetricsServer::~MetricsServer() = default;

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, int port, std::vector<std::shared_ptr<prometheus::Collectable>> what) {
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->collectables_ = std::move(what);
  const std::string address = absl::StrCat(host, ":", port);
  try {
    server->exposer_ = std::make_unique<prometheus::Exposer>(address);
  } catch (const std::exception&) {
    return absl::UnavailableError(absl::StrCat(
        "cannot serve metrics at ", address, ": the address is in use, unknown or not permitted"));
  }
  for (const auto& collectable : server->collectables_) {
    server->exposer_->RegisterCollectable(collectable);
  }
  return server;
}

int MetricsServer::port() const {
  const std::vector<int> ports = exposer_->GetListeningPorts();
  return ports.empty() ? 0 : ports.front();
}

std::string HostOf(absl::string_view address) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 || absl::StartsWith(address, "unix:")) {
    return "127.0.0.1";
  }
  const absl::string_view host = address.substr(0, colon);
  return host == "localhost" ? "127.0.0.1" : std::string(host);
}

}  // namespace tributary::telemetry
