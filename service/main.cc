// tributary-coordinator: settings, workers, servers, and an orderly end.
#include <grpcpp/grpcpp.h>

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/config/command_line.h"
#include "base/config/settings_reload.h"
#include "base/process/shutdown_signals.h"
#include "base/process/version.h"
#include "base/rpc/keepalive.h"
#include "base/rpc/listening.h"
#include "base/status/status_macros.h"
#include "base/sync/mutex.h"
#include "base/telemetry/families.h"
#include "base/telemetry/library_log.h"
#include "base/telemetry/log.h"
#include "base/telemetry/metrics_server.h"
#include "base/telemetry/otlp_exporter.h"
#include "base/telemetry/trace.h"
#include "service/api/operations_service.h"
#include "service/api/server.h"
#include "service/config.h"
#include "service/coordinator/coordinator.h"
#include "service/observe/diagnostics_service.h"
#include "service/observe/telemetry.h"
#include "service/workers/embedded_group.h"
#include "service/workers/remote_group.h"
#include "worker/cuda_backend.h"

namespace tributary::service {
namespace {

constexpr int kCannotServe = 1;
constexpr int kLostDevice = 1;
// For how long a group waits for workers that the flag says it is to have more.
constexpr std::chrono::milliseconds kWorkersPatience = std::chrono::minutes(10);

// The servers, once they are there. The coordinator tells its readiness from threads of its own,
// and may do so before.
class PublicServer {
 public:
  void Set(std::unique_ptr<Server> server) {
    const MutexLock lock(mutex_);
    server_ = std::move(server);
  }
  void SetReady(bool ready) {
    const MutexLock lock(mutex_);
    if (server_ != nullptr) server_->SetReady(ready);
  }

 private:
  Mutex mutex_;
  std::unique_ptr<Server> server_ TRIBUTARY_GUARDED_BY(mutex_);
};

CoordinatorOptions OptionsOf(const Config& config) {
  CoordinatorOptions options;
  options.batch = {.max_rows = config.batch_max_rows,
                   .max_entries = config.batch_max_entries,
                   .window = config.batch_window};
  options.pipeline_depth = config.pipeline_depth;
  options.step_timeout = config.step_timeout;
  options.max_call_timeout = config.max_call_timeout;
  options.retry_delay = config.retry_delay;
  options.max_message_bytes = static_cast<size_t>(config.max_message_bytes);
  options.max_sequences = config.max_sequences;
  options.client_limits = {.sequences = config.max_sequences_per_client,
                           .pages = config.max_pages_per_client,
                           .caches = config.max_caches_per_client,
                           .cache_bytes = config.max_cache_bytes_per_client,
                           .sessions = config.max_sessions_per_client,
                           .mailbox_bytes = config.max_mailbox_bytes_per_client};
  options.session_limits = {.sessions = config.max_sessions,
                            .mailbox_bytes = static_cast<uint64_t>(config.max_mailbox_bytes),
                            .spin = config.session_spin};
  options.shared_memory_prefixes = config.shared_memory_prefixes;
  options.deterministic = config.deterministic;
  options.replicas = config.replicas;
  options.lease_timeout = config.lease_timeout;
  return options;
}

// Why the process is to end, told by whoever is first.
class End {
 public:
  // The process ends with `code`.
  void Ask(int code) {
    std::call_once(once_, [&] { asked_.set_value(code); });
  }
  std::future<int> asked() { return asked_.get_future(); }

 private:
  std::once_flag once_;
  std::promise<int> asked_;
};

std::unique_ptr<WorkerGroup> EmbeddedWorkers(const Config& config,
                                             const std::shared_ptr<const telemetry::Logger>& log,
                                             End* end) {
  return CreateEmbeddedGroup({.workers = config.embedded_workers,
                              .threads = config.threads,
                              .strategy = config.exchange,
                              .memory_limit = static_cast<size_t>(config.memory_limit_bytes),
                              .device = config.device,
                              .first_gpu = config.first_gpu,
                              .deterministic = config.deterministic,
                              .exchange_place = config.device_exchange,
                              .on_exchange = [log](const std::string& how) { log->Info(how); },
                              .on_lost =
                                  [log, end](const absl::Status& status) {
                                    log->Error("a device is lost; ending, to be started again",
                                               {{"error", status.message()}});
                                    end->Ask(kLostDevice);
                                  }});
}

// Where worker processes register. Ends after the group has been stopped and before it is
// destroyed.
struct WorkerServer {
  std::unique_ptr<grpc::Server> server;

  void Stop() {
    if (server != nullptr) server->Shutdown(std::chrono::system_clock::now());
    server.reset();
  }
};

std::unique_ptr<WorkerGroup> RemoteWorkers(const Config& config,
                                           const std::shared_ptr<Journal>& journal,
                                           const std::shared_ptr<const telemetry::Logger>& log,
                                           WorkerServer* workers) {
  auto group = CreateRemoteGroup({.size = journal ? journal->ranks() : config.workers,
                                  .wanted_size = config.workers,
                                  .strategy = config.exchange,
                                  .exchange_place = config.device_exchange,
                                  .device = config.device,
                                  .deterministic = config.deterministic,
                                  .form_timeout = config.form_timeout,
                                  .access = config.access,
                                  .join_secret = config.join_secret,
                                  .identity = journal ? journal->identity() : GroupIdentity(),
                                  .store = journal,
                                  .log = log});
  if (!CheckFree(config.worker_listen).ok()) return nullptr;
  grpc::ServerBuilder builder;
  ForbidSharedPorts(&builder);
  SetServerKeepalive(builder, {});
  int port = 0;
  builder.AddListeningPort(config.worker_listen, ServerCredentialsFrom(config.tls), &port);
  group->AddTo(builder);
  workers->server = builder.BuildAndStart();
  if (workers->server == nullptr || port == 0) return nullptr;
  return group;
}

absl::StatusOr<std::unique_ptr<Server>> StartServer(const Config& config,
                                                    std::vector<grpc::Service*> more_services,
                                                    Coordinator* coordinator) {
  return Server::Start({.listen = config.listen,
                        .admin_listen = config.admin_listen,
                        .socket_mode = config.socket_mode,
                        .max_message_bytes = static_cast<int>(config.max_message_bytes),
                        .max_calls_per_stream = config.max_calls_per_stream,
                        .reflection = config.reflection,
                        .tls = config.tls,
                        .access = config.access,
                        .shared_memory_from_anywhere = config.shared_memory_from_anywhere,
                        .max_calls_per_client = config.max_calls_per_client,
                        .max_streams_per_client = config.max_streams_per_client,
                        .bytes_in_flight = {.per_caller = config.max_bytes_per_client,
                                            .in_all = config.max_bytes_in_flight},
                        .streams = {.reply_timeout = config.reply_timeout},
                        .more_services = std::move(more_services),
                        .drain_settle = config.drain_settle},
                       coordinator);
}

using Collectables = std::vector<std::shared_ptr<prometheus::Collectable>>;

// Null, and OK, when the configuration asks for no metrics.
absl::StatusOr<std::unique_ptr<telemetry::MetricsServer>> StartMetrics(const Config& config,
                                                                       const Collectables& what) {
  if (!config.metrics_port.has_value()) return nullptr;
  return telemetry::MetricsServer::Start(telemetry::HostOf(config.admin_listen),
                                         *config.metrics_port, what);
}

std::shared_ptr<telemetry::TraceBuffer> SpansOf(const Config& config) {
  if (config.trace_spans == 0) return nullptr;
  return std::make_shared<telemetry::TraceBuffer>(config.trace_spans, config.trace_sample,
                                                  "coordinator");
}

// A group that goes on with another number of workers than the flag says is to have those of the
// flag, when they are there.
void ChangeWorkersIfAsked(const Config& config, Coordinator& coordinator) {
  if (config.workers == 0) return;
  v1::ChangeWorkersRequest request;
  request.set_workers(config.workers);
  request.set_patience_ms(static_cast<uint32_t>(kWorkersPatience.count()));
  // What comes of it is in the log.
  coordinator.ChangeWorkers(request, [](const absl::StatusOr<v1::ChangeWorkersReply>&) {});
}

// Starts metrics and workers, and serves until the end is asked for, by a signal for example, and
// calls are drained. Returns the exit code.
int ServeUntilAsked(const Config& config, const std::shared_ptr<const telemetry::Logger>& log,
                    const Telemetry& observer,
                    const std::shared_ptr<const telemetry::TraceBuffer>& spans,
                    Coordinator& coordinator, std::future<int> asked, Server& server) {
  // The two below ask the coordinator, and end before that does.
  const Collectables collectables = {
      MakeCollectable(observer.metrics(), [&coordinator] { return coordinator.TakeSnapshot(); }),
      telemetry::ProcessMetrics(BuildVersion(), "coordinator")};
  const auto metrics = StartMetrics(config, collectables);
  if (!metrics.ok()) {
    log->Error(metrics.status().message());
    return kCannotServe;
  }
  const auto exporter = telemetry::OtlpExporter::Start(
      config.otlp, telemetry::ResourceOf("tributary-coordinator", BuildVersion()), spans,
      collectables, log);
  if (!exporter.ok()) {
    log->Error(exporter.status().message());
    return kCannotServe;
  }
  if (absl::Status started = coordinator.Start(); !started.ok()) {
    log->Error("cannot start the workers", {{"error", started.message()}});
    return kCannotServe;
  }
  log->Info("listening", {{"addresses", absl::StrJoin(server.addresses(), ",")},
                          {"admin", server.admin_address()},
                          {"device", Name(config.device)},
                          {"metrics_port", *metrics == nullptr ? 0 : (*metrics)->port()},
                          {"embedded_workers", config.embedded_workers},
                          {"workers", config.workers}});
  ChangeWorkersIfAsked(config, coordinator);
  const int code = asked.get();
  const bool drained = server.Drain(std::chrono::steady_clock::now() + config.drain_timeout);
  if (!drained) log->Warning("calls were still in flight when the drain timeout passed");
  return code;
}

// A setting that is a whole number of at least 0, and what is to be done with it.
SettingsReload::Apply Number(std::function<void(int64_t)> set) {
  return [set = std::move(set)](const std::string& text) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number) || number < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("must be a whole number >= 0, is '", text, "'"));
    }
    set(number);
    return absl::OkStatus();
  };
}

SettingsReload::Apply SampleRatio(const std::shared_ptr<telemetry::TraceBuffer>& spans) {
  return [spans](const std::string& text) {
    double ratio = 0;
    if (!absl::SimpleAtod(text, &ratio) || !(ratio >= 0 && ratio <= 1)) {
      return absl::InvalidArgumentError(absl::StrCat("must be 0 to 1, is '", text, "'"));
    }
    if (spans != nullptr) spans->SetSampleRatio(ratio);
    return absl::OkStatus();
  };
}

// The settings that count without a restart, and how each is applied.
std::map<std::string, SettingsReload::Apply> Reloadable(
    const std::shared_ptr<telemetry::Logger>& log,
    const std::shared_ptr<telemetry::TraceBuffer>& spans, Coordinator& coordinator,
    Server& server) {
  ClientLimits& clients = coordinator.client_limits();
  const auto live = [](LiveLimit& limit) { return Number([&limit](int64_t n) { limit = n; }); };
  const auto bytes = [&server](int64_t ByteLimits::*which) {
    return Number([&server, which](int64_t most) {
      ByteLimits limits = server.bytes_in_flight();
      limits.*which = most;
      server.SetBytesInFlight(limits);
    });
  };
  return {
      {"log_level", [log](const std::string& text) { return telemetry::SetLevel(text, *log); }},
      {"trace_sample", SampleRatio(spans)},
      {"max_calls_per_client", Number([&server](int64_t n) { server.SetMaxCallsPerClient(n); })},
      {"max_streams_per_client",
       Number([&server](int64_t n) { server.SetMaxStreamsPerClient(n); })},
      {"max_bytes_per_client", bytes(&ByteLimits::per_caller)},
      {"max_bytes_in_flight", bytes(&ByteLimits::in_all)},
      {"max_sequences_per_client", live(clients.sequences)},
      {"max_pages_per_client", live(clients.pages)},
      {"max_caches_per_client", live(clients.caches)},
      {"max_cache_bytes_per_client", live(clients.cache_bytes)},
      {"max_sessions_per_client", live(clients.sessions)},
      {"max_mailbox_bytes_per_client", live(clients.mailbox_bytes)},
  };
}

int Serve(const Config& config, SettingsReload& reload) {
  const auto log = std::make_shared<telemetry::Logger>(config.log_level, config.log_format);
  LogLibrariesTo(log);
  // Before all that has threads, and destroyed after it: a second signal ends even the stopping.
  End end;
  ShutdownSignals signals;
  signals.Start(log, [&end] { end.Ask(0); });

  std::shared_ptr<Journal> journal;
  if (!config.state_dir.empty()) {
    absl::StatusOr<std::shared_ptr<Journal>> opened =
        Journal::Open(config.state_dir, config.workers, log);
    if (absl::IsInvalidArgument(opened.status())) {
      PrintStartError("tributary-coordinator", opened.status());
      return kExitWrongUsage;
    }
    if (!opened.ok()) {
      log->Error(opened.status().message());
      return kCannotServe;
    }
    journal = *std::move(opened);
  }
  WorkerServer workers;
  std::unique_ptr<WorkerGroup> group = config.workers > 0
                                           ? RemoteWorkers(config, journal, log, &workers)
                                           : EmbeddedWorkers(config, log, &end);
  if (group == nullptr) {
    log->Error("cannot listen for workers: the address is in use, unknown or not permitted",
               {{"address", config.worker_listen}});
    return kCannotServe;
  }

  PublicServer published;
  CoordinatorOptions options = OptionsOf(config);
  const std::shared_ptr<telemetry::TraceBuffer> spans = SpansOf(config);
  const auto observer = std::make_shared<Telemetry>(group->size(), log, spans);
  options.build_version = BuildVersion();
  options.observer = observer;
  options.journal = journal;
  options.on_readiness = [&published](bool ready) { published.SetReady(ready); };
  DiagnosticsService diagnostics(observer, config.access);
  Coordinator coordinator(options, std::move(group), log);
  const absl::Cleanup stop = [&] {
    reload.Stop();
    coordinator.Stop();
    workers.Stop();
    published.Set(nullptr);
  };
  OperationsService operations(&coordinator, config.access);
  absl::StatusOr<std::unique_ptr<Server>> started =
      StartServer(config, {&diagnostics, &operations}, &coordinator);
  if (!started.ok()) {
    log->Error(started.status().message());
    return kCannotServe;
  }
  Server& server = **started;  // `stop` ends it
  published.Set(*std::move(started));
  reload.Start(log, Reloadable(log, spans, coordinator, server));
  const int code = ServeUntilAsked(config, log, *observer, spans, coordinator, end.asked(), server);
  if (code == 0 && !config.trace_file.empty() && spans != nullptr) {
    const absl::Status written = spans->WriteTo(config.trace_file);
    if (!written.ok()) log->Warning("trace not written", {{"error", written.message()}});
  }
  if (code == 0) log->Info("stopping");
  return code;
}

}  // namespace
}  // namespace tributary::service

int main(int argc, char** argv) {
  if (tributary::service::PrintsHelp(argc, argv)) return 0;
  if (tributary::PrintsVersion(argc, argv, "tributary-coordinator")) return 0;
  tributary::worker::SetCudaEnvironment();
  const absl::StatusOr<tributary::service::Config> config =
      tributary::service::LoadConfig(argc, argv);
  if (!config.ok()) {
    tributary::PrintStartError("tributary-coordinator", config.status());
    return tributary::kExitWrongUsage;
  }
  tributary::SettingsReload reload(argc, argv);
  return tributary::service::Serve(*config, reload);
}
