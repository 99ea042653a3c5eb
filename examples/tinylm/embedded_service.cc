#include "examples/tinylm/embedded_service.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/embedded_group.h"
#include "service/log.h"

namespace tributary::tinylm {
namespace {

constexpr std::chrono::seconds kStartTimeout{20};
constexpr std::chrono::seconds kDrainTimeout{5};

absl::StatusOr<std::filesystem::path> MakePrivateFolder() {
  std::error_code error;
  const std::filesystem::path base = std::filesystem::temp_directory_path(error);
  std::string pattern = ((error ? "/tmp" : base) / "tinylm-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat(pattern, ": ", std::strerror(errno)));
  }
  return pattern;
}

}  // namespace

EmbeddedService::EmbeddedService(std::filesystem::path folder) : folder_(std::move(folder)) {}

absl::StatusOr<std::unique_ptr<EmbeddedService>> EmbeddedService::Start(int workers) {
  if (workers < 1) return absl::InvalidArgumentError("workers must be >= 1");
  absl::StatusOr<std::filesystem::path> folder = MakePrivateFolder();
  if (!folder.ok()) return folder.status();
  std::unique_ptr<EmbeddedService> self(new EmbeddedService(*std::move(folder)));

  auto ready = std::make_shared<std::promise<void>>();
  auto told = std::make_shared<std::once_flag>();
  service::CoordinatorOptions options;
  options.on_readiness = [ready, told](bool is_ready) {
    if (is_ready) std::call_once(*told, [&ready] { ready->set_value(); });
  };
  self->coordinator_ = std::make_unique<service::Coordinator>(
      options, service::CreateEmbeddedGroup({.workers = workers}),
      std::make_shared<const service::Logger>(service::LogLevel::kWarning,
                                              service::LogFormat::kText));
  absl::StatusOr<std::unique_ptr<service::Server>> server = service::Server::Start(
      {.listen = {self->target()}, .reflection = false}, self->coordinator_.get());
  if (!server.ok()) return server.status();
  self->server_ = *std::move(server);
  if (absl::Status started = self->coordinator_->Start(); !started.ok()) return started;
  if (ready->get_future().wait_for(kStartTimeout) != std::future_status::ready) {
    return absl::UnavailableError("the embedded workers did not become ready");
  }
  return self;
}

EmbeddedService::~EmbeddedService() {
  if (server_ != nullptr) server_->Drain(std::chrono::steady_clock::now() + kDrainTimeout);
  if (coordinator_ != nullptr) coordinator_->Stop();
  server_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace tributary::tinylm
