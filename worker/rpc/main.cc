// tributary-worker: one rank of a group, as a process.
#include <signal.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/config/check_flags.h"
#include "base/config/command_line.h"
#include "base/config/flag_help.h"
#include "base/config/settings_reload.h"
#include "base/process/shutdown_signals.h"
#include "base/process/version.h"
#include "base/rpc/admin_server.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "base/telemetry/families.h"
#include "base/telemetry/library_log.h"
#include "base/telemetry/log.h"
#include "base/telemetry/metrics_server.h"
#include "base/telemetry/otlp_exporter.h"
#include "base/telemetry/trace.h"
#include "worker/backends.h"
#include "worker/cuda_backend.h"
#include "worker/rpc/peer_security.h"
#include "worker/rpc/place_in_group.h"
#include "worker/rpc/worker.h"
#include "worker/rpc/worker_metrics.h"

ABSL_FLAG(std::string, config, "",
          "The worker reads settings from this YAML file, one `flag: value` per line; flags on the "
          "command line win.");
ABSL_FLAG(std::string, coordinator, "",
          "The coordinator listens for workers at this address (its --worker_listen): host:port or "
          "unix:/path.");
ABSL_FLAG(std::string, host, "127.0.0.1", "The other workers reach this machine at this address.");
ABSL_FLAG(int, rank, -1,
          "The worker asks for this place in the group, the ordinal of a StatefulSet for example; "
          "-1 means any.");
ABSL_FLAG(int, ranks_per_node, 0,
          "Each node runs this many workers of the group, and --rank is the place among them: the "
          "place in the group is node * ranks_per_node + rank. 0 means that --rank is the place in "
          "the group.");
ABSL_FLAG(int, node, 0,
          "The worker's node has this index among the nodes of the group, from 0; it counts with "
          "--ranks_per_node.");
ABSL_FLAG(int, world_size, 0,
          "The worker is meant for a group of this size, and other groups refuse it; 0 means any.");
ABSL_FLAG(std::string, device, "cpu",
          "The worker computes on this device: cpu or cuda. The coordinator must be started with "
          "the same value.");
ABSL_FLAG(int, gpu, -1,
          "With --device=cuda, the worker takes this GPU; -1 means the rank's place among the GPUs "
          "of this machine.");
ABSL_FLAG(int, threads, 0, "The worker computes with this many threads; 0 means one per core.");
ABSL_FLAG(uint64_t, memory_limit, 0,
          "The shards may take this many bytes, and caches beyond that are refused; 0 means what "
          "the device has free (for a CPU worker, what the machine or its control group gives, "
          "whichever is less).");
ABSL_FLAG(std::string, admin_listen, "",
          "The admin server listens at this address, host:port, in plain text, and carries "
          "grpc.health.v1 (services '', 'liveness' and 'readiness'). Port 0 picks a free one, "
          "which is logged; when empty, there is no such server.");
ABSL_FLAG(std::optional<int32_t>, metrics_port, std::nullopt,
          "The worker serves /metrics for Prometheus over HTTP at this port, on the host of "
          "--admin_listen (on loopback without one); 9464 is the custom, 0 picks a free one, which "
          "is logged. Without this flag there are no metrics.");
ABSL_FLAG(std::string, log_level, "info",
          "The log holds messages of this level and above: debug, info, warning or error.");
ABSL_FLAG(std::string, log_format, "text",
          "The log is written as text, or as json with one object per line.");
ABSL_FLAG(std::string, trace_file, "",
          "The worker writes the spans of traced steps to this file when the process ends: "
          "as Chrome trace JSON where its name ends with .json, else in Perfetto's format.");
ABSL_FLAG(int32_t, trace_spans, 65536,
          "The worker keeps this many spans, the last ones; 0 means that nothing is traced.");
ABSL_FLAG(std::string, otlp_endpoint, "",
          "The worker sends spans and metrics to the OpenTelemetry collector at this address, "
          "http://host:4318 or https://..., as OTLP over HTTP in JSON (to /v1/traces and "
          "/v1/metrics). When empty, nothing is sent.");
ABSL_FLAG(absl::Duration, otlp_interval, absl::Seconds(10), "It sends what is new this often.");
ABSL_FLAG(std::string, otlp_ca, "",
          "One of the authorities in this PEM file must have signed the collector's certificate; "
          "when empty, one of the system's.");
ABSL_FLAG(std::string, otlp_headers_file, "",
          "Each request to the collector carries the headers in this file, one per line, such as "
          "'Authorization: Bearer ...'. The file is read again for each request.");
ABSL_FLAG(absl::Duration, reconnect_min, absl::Milliseconds(100),
          "The first pause before the worker dials the coordinator again takes this long; later "
          "pauses double.");
ABSL_FLAG(absl::Duration, reconnect_max, absl::Seconds(5),
          "No pause before dialling again takes longer than this.");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(10),
          "After SIGTERM, the worker waits this long for the coordinator to let it go.");
ABSL_FLAG(absl::Duration, orphan_timeout, absl::Minutes(10),
          "The worker keeps its shards this long while the coordinator is away. A coordinator with "
          "a --state_dir that comes back meanwhile goes on with them.");
ABSL_FLAG(std::string, tls_ca, "",
          "One of the authorities in this PEM file must have signed the coordinator's certificate; "
          "when empty, the worker speaks plain text.");
ABSL_FLAG(std::string, tls_server_name, "",
          "The coordinator's certificate must have this name; when empty, that of the host in "
          "--coordinator.");
ABSL_FLAG(
    std::string, tls_cert, "",
    "The worker shows the certificate chain in this PEM file to coordinators that ask for one.");
ABSL_FLAG(std::string, tls_key, "", "This PEM file holds the key of the worker's certificate.");
ABSL_FLAG(
    std::string, peer_tls, "auto",
    "What workers send each other travels under TLS: always, never, or auto, that is wherever "
    "this worker speaks TLS to the coordinator. All workers of a group must agree. Keys are "
    "made for each group and need no files. GPUs exchange partials without it.");
ABSL_FLAG(std::string, token_file, "",
          "The worker shows the coordinator the bearer token on the first line of this file.");
ABSL_FLAG(std::string, join_secret_file, "",
          "The worker shows the coordinator the secret on the first line of this file, as its "
          "--join_secret_file asks for.");
ABSL_FLAG(uint64_t, max_message_bytes, uint64_t{1} << 30,
          "No message from or to the coordinator may be larger than this.");

namespace tributary::worker {
namespace {

constexpr char kUsage[] =
    "One worker of Tributary: holds a shard of the KV cache and attends over it.\n\n"
    "  tributary-worker --coordinator=10.0.0.1:7402 --host=10.0.0.2 --admin_listen=0.0.0.0:7401\n\n"
    "It dials the coordinator, is given a rank, connects to the other workers over TCP and\n"
    "executes steps. When the coordinator or another worker was away, it comes back by itself\n"
    "with what it holds. On SIGTERM it finishes what is in flight and exits with status 0; a\n"
    "second SIGTERM ends it at once.";

using LoggerPtr = std::shared_ptr<const telemetry::Logger>;

// Null when no address is given.
absl::StatusOr<std::unique_ptr<AdminServer>> StartAdmin(const LoggerPtr& log) {
  const std::string address = absl::GetFlag(FLAGS_admin_listen);
  if (address.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<AdminServer>> admin = AdminServer::Start(address);
  if (!admin.ok()) {
    return absl::UnavailableError(absl::StrCat("--admin_listen: ", admin.status().message()));
  }
  log->Info(absl::StrCat("admin: listening on ", (*admin)->address()),
            {{"port", (*admin)->port()}});
  return admin;
}

absl::Status ReadDevice(WorkerOptions* options) {
  const std::string name = absl::GetFlag(FLAGS_device);
  if (!Parse(name, &options->rank.device)) {
    return InvalidField("device", absl::StrCat("must be cpu or cuda, is '", name, "'"));
  }
  options->session.backend = Name(options->rank.device);
  options->rank.gpu = absl::GetFlag(FLAGS_gpu);
  if (options->rank.gpu < -1) return InvalidField("gpu", "must be >= -1");
  if (options->rank.device == Device::kCpu) return absl::OkStatus();
  const absl::Status found = CheckGpus(std::max(0, options->rank.gpu), 1);
  if (found.ok()) return found;
  return absl::FailedPreconditionError(absl::StrCat("--device=cuda: ", found.message()));
}

absl::Status CheckFiles(const ChannelSecurity& security) {
  TRIBUTARY_RETURN_IF_ERROR(CheckReadable("tls_ca", security.tls.authorities));
  TRIBUTARY_RETURN_IF_ERROR(CheckReadable("tls_cert", security.tls.certificate));
  TRIBUTARY_RETURN_IF_ERROR(CheckReadable("tls_key", security.tls.key));
  TRIBUTARY_RETURN_IF_ERROR(CheckReadable("token_file", security.token_file));
  TRIBUTARY_RETURN_IF_ERROR(CheckReadable("join_secret_file", security.join_secret_file));
  if (security.tls.certificate.empty() == security.tls.key.empty()) return absl::OkStatus();
  return security.tls.key.empty() ? InvalidField("tls_key", "is missing; tls_cert is given")
                                  : InvalidField("tls_cert", "is missing; tls_key is given");
}

absl::StatusOr<WorkerOptions> OptionsFromFlags() {
  WorkerOptions options;
  options.coordinator = absl::GetFlag(FLAGS_coordinator);
  if (options.coordinator.empty()) {
    return InvalidField("coordinator", "must be given");
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckAddress("coordinator", options.coordinator));
  if (absl::GetFlag(FLAGS_host).empty()) return InvalidField("host", "must not be empty");
  const std::string admin = absl::GetFlag(FLAGS_admin_listen);
  if (!admin.empty()) TRIBUTARY_RETURN_IF_ERROR(CheckAddress("admin_listen", admin));
  TRIBUTARY_RETURN_IF_ERROR(ReadDevice(&options));
  options.security = {.tls = {.certificate = absl::GetFlag(FLAGS_tls_cert),
                              .key = absl::GetFlag(FLAGS_tls_key),
                              .authorities = absl::GetFlag(FLAGS_tls_ca)},
                      .server_name = absl::GetFlag(FLAGS_tls_server_name),
                      .token_file = absl::GetFlag(FLAGS_token_file),
                      .join_secret_file = absl::GetFlag(FLAGS_join_secret_file)};
  if (!options.security.server_name.empty() && options.security.tls.authorities.empty()) {
    return InvalidField("tls_ca", "is missing; tls_server_name is given");
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckFiles(options.security));
  options.session.security = options.security;
  if (!Parse(absl::GetFlag(FLAGS_peer_tls), &options.session.peer_tls)) {
    return InvalidField("peer_tls", absl::StrCat("must be auto, always or never, is '",
                                                 absl::GetFlag(FLAGS_peer_tls), "'"));
  }
  TRIBUTARY_RETURN_IF_ERROR(
      CheckPeerTls(options.session.peer_tls, options.coordinator, options.security));
  options.session.build_version = BuildVersion();
  options.session.host = absl::GetFlag(FLAGS_host);
  TRIBUTARY_ASSIGN_OR_RETURN(options.session.rank,
                             PlaceInGroup({.rank = absl::GetFlag(FLAGS_rank),
                                           .ranks_per_node = absl::GetFlag(FLAGS_ranks_per_node),
                                           .node = absl::GetFlag(FLAGS_node)}));
  options.session.world_size = absl::GetFlag(FLAGS_world_size);
  if (options.session.world_size < 0) {
    return InvalidField("world_size", "must be >= 0");
  }
  if (options.session.world_size > 0 &&
      options.session.rank.value_or(0) >= options.session.world_size) {
    return InvalidField("rank", "must be less than --world_size");
  }
  options.rank.threads = absl::GetFlag(FLAGS_threads);
  if (options.rank.threads < 0 || options.rank.threads > kMostThreads) {
    return InvalidField("threads", absl::StrCat("must be 0 to ", kMostThreads));
  }
  if (options.rank.threads == 0) {
    options.rank.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  options.rank.memory_limit = absl::GetFlag(FLAGS_memory_limit);
  options.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  options.reconnect_min = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_reconnect_min));
  options.reconnect_max = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_reconnect_max));
  if (options.reconnect_min.count() < 1 || options.reconnect_max < options.reconnect_min) {
    return InvalidField("reconnect_min", "must be at least 1ms and at most --reconnect_max");
  }
  const absl::Duration drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  if (drain_timeout < absl::Milliseconds(1) || drain_timeout > absl::Hours(24)) {
    return InvalidField("drain_timeout", "must be 1ms to 24h");
  }
  options.drain_timeout = absl::ToChronoMilliseconds(drain_timeout);
  const absl::Duration orphan_timeout = absl::GetFlag(FLAGS_orphan_timeout);
  if (orphan_timeout < absl::ZeroDuration() || orphan_timeout > absl::Hours(24 * 365)) {
    return InvalidField("orphan_timeout", "must be 0 to 8760h");
  }
  options.orphan_timeout = absl::ToChronoMilliseconds(orphan_timeout);
  return options;
}

absl::StatusOr<std::shared_ptr<telemetry::Logger>> LoggerFromFlags() {
  telemetry::LogLevel level = telemetry::LogLevel::kInfo;
  telemetry::LogFormat format = telemetry::LogFormat::kText;
  if (!telemetry::Parse(absl::GetFlag(FLAGS_log_level), &level)) {
    return InvalidField("log_level", "must be debug, info, warning or error");
  }
  if (!telemetry::Parse(absl::GetFlag(FLAGS_log_format), &format)) {
    return InvalidField("log_format", "must be text or json");
  }
  return std::make_shared<telemetry::Logger>(level, format);
}

using Collectables = std::vector<std::shared_ptr<prometheus::Collectable>>;

// Null when none is wanted.
absl::StatusOr<std::unique_ptr<telemetry::MetricsServer>> StartMetrics(const Collectables& what) {
  const std::optional<int32_t> port = absl::GetFlag(FLAGS_metrics_port);
  if (!port.has_value()) return nullptr;
  return telemetry::MetricsServer::Start(telemetry::HostOf(absl::GetFlag(FLAGS_admin_listen)),
                                         *port, what);
}

telemetry::OtlpOptions OtlpFromFlags() {
  return {.endpoint = absl::GetFlag(FLAGS_otlp_endpoint),
          .interval = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_otlp_interval)),
          .authorities = absl::GetFlag(FLAGS_otlp_ca),
          .headers_file = absl::GetFlag(FLAGS_otlp_headers_file)};
}

int Fail(const absl::Status& status, int code) {
  PrintStartError("tributary-worker", status);
  return code;
}

constexpr int kExitRefused = 1;

int Main(int argc, char** argv) {
  ShutdownSignals signals;
  SettingsReload reload(argc, argv);
  signal(SIGPIPE, SIG_IGN);
  absl::StatusOr<WorkerOptions> options = OptionsFromFlags();
  if (!options.ok()) {
    const bool usage = absl::IsInvalidArgument(options.status());
    return Fail(options.status(), usage ? kExitWrongUsage : kExitRefused);
  }
  const absl::StatusOr<std::shared_ptr<telemetry::Logger>> log = LoggerFromFlags();
  if (!log.ok()) return Fail(log.status(), kExitWrongUsage);
  LogLibrariesTo(*log);
  const int32_t metrics_port = absl::GetFlag(FLAGS_metrics_port).value_or(0);
  if (metrics_port < 0 || metrics_port > 65535) {
    return Fail(InvalidField("metrics_port", "must be 0 to 65535"), kExitWrongUsage);
  }
  if (absl::GetFlag(FLAGS_trace_spans) < 0) {
    return Fail(InvalidField("trace_spans", "must be >= 0"), kExitWrongUsage);
  }
  const telemetry::OtlpOptions otlp = OtlpFromFlags();
  if (const absl::Status checked = telemetry::CheckOtlp(otlp); !checked.ok()) {
    return Fail(checked, kExitWrongUsage);
  }

  const absl::StatusOr<std::unique_ptr<AdminServer>> admin = StartAdmin(*log);
  if (!admin.ok()) return Fail(admin.status(), kExitRefused);
  if (*admin != nullptr) {
    options->on_ready = [server = admin->get()](bool ready) { server->SetReady(ready); };
  }

  const int32_t trace_spans = absl::GetFlag(FLAGS_trace_spans);
  const auto spans = trace_spans == 0
                         ? nullptr
                         : std::make_shared<telemetry::TraceBuffer>(trace_spans, 0, "worker");
  const auto metrics = std::make_shared<WorkerMetrics>(spans);
  options->session.log = *log;
  options->session.observer = metrics;

  Worker worker(*std::move(options));
  metrics->set_shard_bytes([&worker] { return worker.shard_bytes(); });
  // The two below go before the worker that they ask.
  const Collectables collectables = {metrics, telemetry::ProcessMetrics(BuildVersion(), "worker")};
  const auto metrics_server = StartMetrics(collectables);
  if (!metrics_server.ok()) return Fail(metrics_server.status(), kExitRefused);
  const auto exporter = telemetry::OtlpExporter::Start(
      otlp, telemetry::ResourceOf("tributary-worker", BuildVersion()), spans, collectables, *log);
  if (!exporter.ok()) return Fail(exporter.status(), kExitRefused);
  if (*metrics_server != nullptr) {
    (*log)->Info("serving metrics", {{"port", (*metrics_server)->port()}});
  }
  reload.Start(*log, {{"log_level", [log = *log](const std::string& text) {
                         return telemetry::SetLevel(text, *log);
                       }}});
  signals.Start(*log, [&worker] { worker.Drain(); });
  const absl::Status status = worker.Run();
  signals.Stop();
  if (!status.ok()) return Fail(status, kExitRefused);
  const std::string trace_file = absl::GetFlag(FLAGS_trace_file);
  if (!trace_file.empty() && spans != nullptr) {
    const absl::Status written = spans->WriteTo(trace_file);
    if (!written.ok()) (*log)->Warning("trace not written", {{"error", written.message()}});
  }
  (*log)->Info("drained");
  return 0;
}

}  // namespace
}  // namespace tributary::worker

int main(int argc, char** argv) {
  if (tributary::PrintsHelp(argc, argv, tributary::worker::kUsage, "worker/rpc/main.cc")) {
    return 0;
  }
  if (tributary::PrintsVersion(argc, argv, "tributary-worker")) return 0;
  tributary::worker::SetCudaEnvironment();
  absl::SetProgramUsageMessage(tributary::worker::kUsage);
  absl::FlagsUsageConfig usage;
  absl::SetFlagsUsageConfig(usage);
  if (const absl::Status parsed = tributary::ParseCommandLine(argc, argv); !parsed.ok()) {
    return tributary::worker::Fail(parsed, tributary::kExitWrongUsage);
  }
  return tributary::worker::Main(argc, argv);
}
