#include "service/cli/embedded_service.h"

#include <stdlib.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/process/version.h"
#include "base/telemetry/log.h"
#include "service/workers/embedded_group.h"

namespace tributary::cli {
namespace {

constexpr std::chrono::seconds kDrainTimeout{5};

}  // namespace

absl::StatusOr<std::unique_ptr<EmbeddedService>> EmbeddedService::Start(
    const EmbeddedServiceOptions& options) {
  std::error_code error;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
  std::string pattern = ((error ? "/tmp" : temporary) / "tributary-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", pattern, ": ", std::strerror(errno)));
  }
  std::unique_ptr<EmbeddedService> self(new EmbeddedService(pattern));
  self->coordinator_ = std::make_unique<service::Coordinator>(
      service::CoordinatorOptions{.build_version = BuildVersion()},
      service::CreateEmbeddedGroup({.workers = options.workers,
                                    .threads = options.threads,
                                    .device = options.device,
                                    .exchange_place = options.exchange_place}),
      std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kWarning,
                                                telemetry::LogFormat::kText));
  auto server = service::Server::Start({.listen = {self->target()}, .reflection = false},
                                       self->coordinator_.get());
  if (!server.ok()) return server.status();
  self->server_ = *std::move(server);
  // Hosts that come before the workers are ready are told when to come back, and do.
  if (absl::Status status = self->coordinator_->Start(); !status.ok()) return status;
  return self;
}

EmbeddedService::~EmbeddedService() {
  if (server_ != nullptr) server_->Drain(std::chrono::steady_clock::now() + kDrainTimeout);
  if (coordinator_ != nullptr) coordinator_->Stop();
  server_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

}  // namespace tributary::cli
