#include "service/embedded/c/tributary_embedded.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "service/client/c/boundary.h"
#include "service/embedded/embedded_service.h"
#include "worker/backends.h"

using tributary::client::Guarded;
using tributary::client::Known;
using tributary::client::Text;
using tributary::service::EmbeddedService;
using tributary::service::EmbeddedServiceOptions;

struct tributary_service {
  std::unique_ptr<EmbeddedService> service;
};

tributary_code tributary_serve(const tributary_service_options* options,
                               tributary_service** service, tributary_error** error) {
  return Guarded(error, [&]() -> absl::Status {
    const auto known = Known(options, "options");
    if (!known.ok()) return known.status();
    EmbeddedServiceOptions wanted{.socket = Text(known->socket),
                                  .threads = known->threads,
                                  .memory_limit_bytes = known->memory_limit_bytes,
                                  .first_gpu = known->first_gpu,
                                  .deterministic = known->deterministic != 0};
    if (known->workers != 0) wanted.workers = known->workers;
    const std::string device = Text(known->device);
    if (!device.empty() && !tributary::worker::Parse(device, &wanted.device)) {
      return tributary::InvalidField("device",
                                     absl::StrCat("must be cpu or cuda, is '", device, "'"));
    }
    auto started = EmbeddedService::Start(wanted);
    if (!started.ok()) return started.status();
    *service = new tributary_service{*std::move(started)};
    return absl::OkStatus();
  });
}

const char* tributary_service_target(const tributary_service* service) {
  return service->service->target().c_str();
}

void tributary_service_stop(tributary_service* service, int64_t drain_ms) {
  if (service == nullptr) return;
  Guarded(nullptr, [&] {
    service->service->Drain(std::chrono::milliseconds(std::max<int64_t>(drain_ms, 0)));
    return absl::OkStatus();
  });
  delete service;
}
