#include "service/embedded/embedded_service.h"

#include <stdlib.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/process/version.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"
#include "service/api/server.h"
#include "service/coordinator/coordinator.h"
#include "service/workers/embedded_group.h"

namespace tributary::service {
namespace {

constexpr size_t kLongestSocketPath = 107;  // sockaddr_un, without its last 0
// How long the workers may take to form their group.
constexpr std::chrono::minutes kFormPatience{1};
constexpr std::chrono::seconds kDrainPatience{5};

// The folder of a socket that nobody named; removed with what is in it.
class Folder {
 public:
  static absl::StatusOr<std::unique_ptr<Folder>> Make() {
    std::error_code error;
    const std::filesystem::path temporary = std::filesystem::temp_directory_path(error);
    std::string pattern = ((error ? "/tmp" : temporary) / "tributary-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      return absl::UnavailableError(
          absl::StrCat("cannot create ", pattern, ": ", std::strerror(errno)));
    }
    return std::make_unique<Folder>(pattern);
  }
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {}
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string File(const char* name) const { return (path_ / name).string(); }

 private:
  const std::filesystem::path path_;
};

absl::Status Check(const EmbeddedServiceOptions& options) {
  if (options.socket.size() > kLongestSocketPath) {
    return InvalidField("socket", absl::StrCat("must have at most ", kLongestSocketPath,
                                               " bytes, has ", options.socket.size()));
  }
  if (options.workers < 1 || options.workers > 1024) {
    return InvalidField("workers", absl::StrCat("must be 1 to 1024, is ", options.workers));
  }
  if (options.threads < 0) return InvalidField("threads", "must be >= 0");
  if (options.first_gpu < 0) return InvalidField("first_gpu", "must be >= 0");
  if (options.memory_limit_bytes < 0) return InvalidField("memory_limit_bytes", "must be >= 0");
  return absl::OkStatus();
}

class Running final : public EmbeddedService {
 public:
  // `folder` is the socket's, or null.
  Running(const EmbeddedServiceOptions& options, std::unique_ptr<Folder> folder)
      : folder_(std::move(folder)),
        target_(absl::StrCat("unix:", folder_ ? folder_->File("socket") : options.socket)),
        log_(std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kWarning,
                                                       telemetry::LogFormat::kText)) {
    CoordinatorOptions settings;
    settings.build_version = BuildVersion();
    settings.deterministic = options.deterministic;
    settings.on_readiness = [this](bool ready) { SetReady(ready); };
    coordinator_ = std::make_unique<Coordinator>(
        settings,
        CreateEmbeddedGroup({.workers = options.workers,
                             .threads = options.threads,
                             .memory_limit = static_cast<size_t>(options.memory_limit_bytes),
                             .device = options.device,
                             .first_gpu = options.first_gpu,
                             .deterministic = options.deterministic,
                             .exchange_place = options.exchange_place,
                             .on_lost =
                                 [log = log_](const absl::Status& status) {
                                   log->Error("a device is lost; start the service again",
                                              {{"error", status.message()}});
                                 }}),
        log_);
  }

  ~Running() override {
    Drain(kDrainPatience);
    coordinator_->Stop();
    const MutexLock lock(mutex_);
    server_.reset();
  }

  absl::Status Start() {
    TRIBUTARY_ASSIGN_OR_RETURN(
        std::unique_ptr<Server> server,
        Server::Start({.listen = {target_}, .admin_listen = "", .reflection = false},
                      coordinator_.get()));
    {
      const MutexLock lock(mutex_);
      server_ = std::move(server);
    }
    TRIBUTARY_RETURN_IF_ERROR(coordinator_->Start());
    const MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + kFormPatience;
    while (!ready_) {
      if (!changed_.WaitUntil(mutex_, deadline) && !ready_) {
        return absl::UnavailableError("the workers did not form their group within a minute");
      }
    }
    return absl::OkStatus();
  }

  const std::string& target() const override { return target_; }

  bool Drain(std::chrono::milliseconds patience) override {
    Server* server = nullptr;
    {
      const MutexLock lock(mutex_);
      if (server_ == nullptr || std::exchange(drained_, true)) return true;
      server = server_.get();  // it is there until this is destroyed
    }
    return server->Drain(std::chrono::steady_clock::now() + patience);
  }

 private:
  // On threads of the coordinator, also before the server is there.
  void SetReady(bool ready) {
    const MutexLock lock(mutex_);
    ready_ = ready;
    if (server_ != nullptr) server_->SetReady(ready);
    changed_.NotifyAll();
  }

  const std::unique_ptr<Folder> folder_;
  const std::string target_;
  const std::shared_ptr<const telemetry::Logger> log_;
  Mutex mutex_;
  CondVar changed_;
  bool ready_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  bool drained_ TRIBUTARY_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Server> server_ TRIBUTARY_GUARDED_BY(mutex_);
  std::unique_ptr<Coordinator> coordinator_;  // destroyed first: it calls SetReady
};

}  // namespace

absl::StatusOr<std::unique_ptr<EmbeddedService>> EmbeddedService::Start(
    const EmbeddedServiceOptions& options) {
  TRIBUTARY_RETURN_IF_ERROR(Check(options));
  std::unique_ptr<Folder> folder;
  if (options.socket.empty()) {
    TRIBUTARY_ASSIGN_OR_RETURN(folder, Folder::Make());
  }
  auto service = std::make_unique<Running>(options, std::move(folder));
  TRIBUTARY_RETURN_IF_ERROR(service->Start());
  return service;
}

}  // namespace tributary::service
