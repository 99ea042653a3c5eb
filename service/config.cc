#include "service/config.h"

#include <charconv>
#include <limits>
#include <optional>
#include <system_error>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/config/check_flags.h"
#include "base/config/command_line.h"
#include "base/config/flag_help.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

ABSL_FLAG(std::string, config, "",
          "The coordinator reads settings from this YAML file: one mapping, whose names are the "
          "flags'. Flags on the command line win.");
ABSL_FLAG(std::vector<std::string>, listen, {"127.0.0.1:7400"},
          "Hosts connect to these addresses, separated by commas: host:port (port 0 picks a free "
          "one) or unix:/path.");
ABSL_FLAG(
    std::string, socket_mode, "0600",
    "Unix sockets have this mode, four octal digits: whoever may write to one may connect. With "
    "0660, the group that the coordinator runs as may, or the group of a directory with the setgid "
    "bit.");
ABSL_FLAG(std::string, admin_listen, "127.0.0.1:7401",
          "The admin server listens at this address, host:port or unix:/path. It speaks plain text "
          "and carries only grpc.health.v1: 'liveness' (this process lives) and 'readiness' (all "
          "workers serve). When empty, there is none.");
ABSL_FLAG(std::optional<int32_t>, metrics_port, std::nullopt,
          "The coordinator serves /metrics for Prometheus over HTTP at this port, on the host of "
          "--admin_listen; 9464 is the custom, 0 picks a free one. Without this flag there are no "
          "metrics.");
ABSL_FLAG(std::optional<int32_t>, embedded_workers, std::nullopt,
          "The coordinator runs this many workers as threads of its own process: 4 by default, or "
          "0 when --workers is given.");
ABSL_FLAG(int32_t, workers, 0,
          "The coordinator waits for this many worker processes (tributary-worker) instead of "
          "running embedded workers.");
ABSL_FLAG(std::string, worker_listen, "127.0.0.1:7402",
          "Worker processes register at this address, host:port; it is used with --workers.");
ABSL_FLAG(std::string, device, "cpu",
          "Workers compute on this device: cpu, or cuda (one GPU per worker). Worker processes "
          "must be started with the same value.");
ABSL_FLAG(int32_t, first_gpu, 0,
          "With --device=cuda, embedded worker r takes GPU first_gpu + r of this machine.");
ABSL_FLAG(bool, deterministic, false,
          "The result of a sequence does not depend, to the bit, on what shares its step. GPUs are "
          "slower then; CPUs always keep to it.");
ABSL_FLAG(
    int32_t, threads, 0,
    "All embedded workers together use this many CPU threads; 0 means as many as the machine has.");
ABSL_FLAG(std::string, exchange, "auto",
          "Workers exchange partial results by this strategy: auto (chosen by size), all_gather, "
          "ag_rs, a2a, or direct (for GPUs that reach each other's memory).");
ABSL_FLAG(std::string, device_exchange, "auto",
          "With --device=cuda, this says where the partial results of several workers meet: auto "
          "(in device memory, by peer access or NCCL, when all workers can, and else in host "
          "memory; the log says why) or host.");
ABSL_FLAG(absl::Duration, step_timeout, absl::Seconds(30),
          "A step that takes longer is aborted, collectives included, and the group re-forms.");
ABSL_FLAG(absl::Duration, form_timeout, absl::Seconds(10),
          "Worker processes may take this long to connect to each other.");
ABSL_FLAG(absl::Duration, max_call_timeout, absl::Minutes(5),
          "No call waits longer than this, whatever its own deadline.");
ABSL_FLAG(absl::Duration, drain_timeout, absl::Seconds(30),
          "Accepted calls may take this long to finish after SIGTERM.");
ABSL_FLAG(absl::Duration, drain_settle, absl::Milliseconds(500),
          "After the last accepted call, callers that come back are told UNAVAILABLE for this long "
          "before connections close.");
ABSL_FLAG(absl::Duration, reply_timeout, absl::Minutes(1),
          "A stream whose client has not taken a reply for this long ends.");
ABSL_FLAG(absl::Duration, retry_delay, absl::Milliseconds(200),
          "UNAVAILABLE and ABORTED ask callers to wait this long before they try again.");
ABSL_FLAG(int64_t, max_message_bytes, int64_t{64} << 20,
          "No message may be larger than this, either way. Tensors in shared memory do not count.");
ABSL_FLAG(int32_t, max_calls_per_stream, 256,
          "One AttendStream may have this many calls in flight; the coordinator reads no further "
          "from it while it has them.");
ABSL_FLAG(int32_t, max_sequences, 65536, "One cache may have this many open sequences.");
ABSL_FLAG(int32_t, batch_max_rows, 4096,
          "At most this many query rows (or new tokens) share a step.");
ABSL_FLAG(int32_t, batch_max_entries, 256, "At most this many sequences share a step.");
ABSL_FLAG(absl::Duration, batch_window, absl::ZeroDuration(),
          "A call may wait this long for others to share its step, although one could begin.");
ABSL_FLAG(int32_t, pipeline_depth, 2, "The workers are handed this many steps at a time.");
ABSL_FLAG(int64_t, memory_limit, 0,
          "Caches may take this many bytes on all embedded workers together; 0 means no limit.");
ABSL_FLAG(int64_t, max_calls_per_client, 0,
          "One client, known by the name of its token or certificate, may have this many calls in "
          "flight; 0 means no limit.");
ABSL_FLAG(int64_t, max_sequences_per_client, 0,
          "One client may hold this many open sequences over all caches, counting those that it "
          "opened or forked; 0 means no limit.");
ABSL_FLAG(int64_t, max_pages_per_client, 0,
          "One client's sequences may hold this many pages over all caches; a page that several of "
          "them share counts once. A page is page_size * workers tokens; 0 means no limit.");
ABSL_FLAG(int64_t, max_streams_per_client, 1024,
          "One client may have this many streams open; 0 means no limit.");
ABSL_FLAG(int64_t, max_bytes_per_client, int64_t{512} << 20,
          "While one client's calls in flight have this many bytes of messages, requests and "
          "replies, its streams are not read and its other calls are refused; 0 means no limit.");
ABSL_FLAG(int64_t, max_bytes_in_flight, int64_t{1} << 30,
          "The same, for the calls of all clients together.");
ABSL_FLAG(int64_t, max_caches_per_client, 256,
          "One client may have created this many caches that were not deleted; 0 means no limit.");
ABSL_FLAG(int64_t, max_cache_bytes_per_client, 0,
          "The caches that one client created may take this many bytes on all workers together; 0 "
          "means no limit.");
ABSL_FLAG(int64_t, max_sessions, 256, "This many sessions may be open at a time.");
ABSL_FLAG(int64_t, max_sessions_per_client, 64,
          "One client may have this many sessions open; 0 means no limit.");
ABSL_FLAG(int64_t, max_mailbox_bytes, int64_t{8} << 30,
          "The mailboxes of all sessions together may take this many bytes.");
ABSL_FLAG(int64_t, max_mailbox_bytes_per_client, int64_t{4} << 30,
          "The mailboxes of one client's sessions may take this many bytes; 0 means no limit.");
ABSL_FLAG(absl::Duration, session_spin, absl::Microseconds(50),
          "For this long a session that waits for its host looks at shared memory without pause; "
          "then it sleeps until it is woken.");
ABSL_FLAG(std::vector<std::string>, shared_memory_prefixes, {},
          "Hosts may name POSIX shared memory objects that begin with one of these, such as "
          "/tributary; / allows any. When empty, they may name none: hosts at the Unix socket hand "
          "sealed memory over, and others send tensors in messages.");
ABSL_FLAG(
    bool, shared_memory_from_anywhere, false,
    "Callers that came neither through a Unix socket nor over loopback may name shared memory "
    "too. Containers that share /dev/shm with the service and call it over a network of their "
    "own need this.");
ABSL_FLAG(std::string, state_dir, "",
          "The coordinator keeps a journal in this directory, which no other coordinator may use. "
          "When it restarts, it goes on with its group, and sequences go on where they were. When "
          "empty, a restart loses them. It takes effect with worker processes (--workers).");
ABSL_FLAG(absl::Duration, lease_timeout, absl::Minutes(10),
          "When no host has presented a lease for this long, the sequences that belong to it are "
          "closed; 0 means never.");
ABSL_FLAG(int32_t, replicas, 0,
          "How many other workers keep each worker's tokens as well, in caches that do not say: 0 "
          "or 1. With 1 nothing is lost when a worker dies, and caches take twice the memory. It "
          "needs at least two worker processes (--workers).");
ABSL_FLAG(std::string, join_secret_file, "",
          "Worker processes must show the secret on the first line of this file, at least 16 "
          "characters, when they register. The file is read again when it changes.");
ABSL_FLAG(
    std::string, tls_cert, "",
    "The server shows the certificate chain in this PEM file to hosts and workers alike. This file "
    "and the next two are read again when they change. When empty, the server speaks plain text.");
ABSL_FLAG(std::string, tls_key, "", "This PEM file holds the key of the server's certificate.");
ABSL_FLAG(
    std::string, tls_client_ca, "",
    "Clients must show a certificate that one of the authorities in this PEM file signed (mTLS).");
ABSL_FLAG(std::string, token_file, "",
          "This file lists bearer tokens, one per line: name role[,role] token. Roles are client, "
          "worker and admin. The file is read again when it changes.");
ABSL_FLAG(std::vector<std::string>, client_san, {},
          "Certificates with one of these names (subject alternative names; *.suffix stands for "
          "one label) may call the API.");
ABSL_FLAG(std::vector<std::string>, worker_san, {},
          "Certificates with one of these names may register as workers.");
ABSL_FLAG(std::vector<std::string>, admin_san, {},
          "Certificates with one of these names may look at the service's state.");
ABSL_FLAG(bool, insecure, false,
          "The coordinator may listen beyond this machine in plain text. Use it only where the "
          "network itself is trusted.");
ABSL_FLAG(bool, reflection, true, "The coordinator offers gRPC server reflection.");
ABSL_FLAG(std::string, log_level, "info",
          "The log holds messages of this level and above: debug, info, warning or error.");
ABSL_FLAG(std::string, log_format, "text",
          "The log is written as text, or as json with one object per line.");
ABSL_FLAG(std::string, trace_file, "",
          "The coordinator writes the spans it keeps to this file when the process ends: as "
          "Chrome trace JSON where its name ends with .json, else in Perfetto's format. `tributary "
          "trace` fetches them at any time.");
ABSL_FLAG(double, trace_sample, 0,
          "This share, 0 to 1, of the calls that bring no traceparent is traced. Calls that bring "
          "one are traced as it says.");
ABSL_FLAG(int32_t, trace_spans, 65536,
          "The coordinator keeps this many spans, the last ones; 0 means that nothing is traced.");
ABSL_FLAG(std::string, otlp_endpoint, "",
          "The coordinator sends spans and metrics to the OpenTelemetry collector at this address, "
          "http://host:4318 or https://..., as OTLP over HTTP in JSON (to /v1/traces and "
          "/v1/metrics). When empty, nothing is sent.");
ABSL_FLAG(absl::Duration, otlp_interval, absl::Seconds(10), "It sends what is new this often.");
ABSL_FLAG(std::string, otlp_ca, "",
          "One of the authorities in this PEM file must have signed the collector's certificate; "
          "when empty, one of the system's.");
ABSL_FLAG(std::string, otlp_headers_file, "",
          "Each request to the collector carries the headers in this file, one per line, such as "
          "'Authorization: Bearer ...'. The file is read again for each request.");

namespace tributary::service {
namespace {

constexpr char kUsage[] =
    "Holds the sharded KV cache of language models and computes attention where it lies.\n"
    "Without flags: four workers as threads of this process, serving 127.0.0.1:7400.\n\n"
    "  tributary-coordinator --listen=unix:/run/tributary.sock --embedded_workers=4\n"
    "  tributary-coordinator --listen=0.0.0.0:7400 --workers=4 --worker_listen=0.0.0.0:7402 \\\n"
    "    --tls_cert=server.pem --tls_key=server.key --token_file=/etc/tributary/tokens\n"
    "  tributary-coordinator --config=/etc/tributary.yaml\n\n"
    "SIGTERM or SIGINT drains and exits 0; a second one exits at once. Exit code 2: bad settings.\n"
    "A setting in the --config file has the flag's name: `embedded_workers: 8`.";

template <typename T>
absl::StatusOr<T> AtLeast(absl::string_view name, T value, T least) {
  if (value < least) {
    return InvalidField(name, absl::StrCat("must be at least ", least, ", is ", value));
  }
  return value;
}

absl::StatusOr<std::chrono::milliseconds> Positive(absl::string_view name, absl::Duration value) {
  if (value < absl::Milliseconds(1) || value > absl::Hours(24)) {
    return InvalidField(name, absl::StrCat("must be 1ms to 24h, is ", absl::FormatDuration(value)));
  }
  return absl::ToChronoMilliseconds(value);
}

absl::Status ReadReplicas(Config* config) {
  config->replicas = absl::GetFlag(FLAGS_replicas);
  if (config->replicas < 0 || config->replicas > 1) {
    return InvalidField("replicas", absl::StrCat("must be 0 or 1, is ", config->replicas));
  }
  if (config->replicas == 0) return absl::OkStatus();
  if (config->workers < 2) {
    return InvalidField(
        "replicas", "needs at least two worker processes (workers): embedded ones end together");
  }
  return absl::OkStatus();
}

absl::Status ReadWorkers(Config* config) {
  const std::optional<int32_t> embedded = absl::GetFlag(FLAGS_embedded_workers);
  TRIBUTARY_ASSIGN_OR_RETURN(config->workers, AtLeast("workers", absl::GetFlag(FLAGS_workers), 0));
  config->embedded_workers = embedded.value_or(config->workers > 0 ? 0 : 4);
  if (config->workers > 0 && config->embedded_workers != 0) {
    return InvalidField("embedded_workers", "workers are given too: choose one of the two");
  }
  if (config->workers == 0) {
    TRIBUTARY_RETURN_IF_ERROR(AtLeast("embedded_workers", config->embedded_workers, 1).status());
  }
  if (config->workers > 1024 || config->embedded_workers > 1024) {
    return InvalidField(config->workers > 0 ? "workers" : "embedded_workers",
                        "must be at most 1024");
  }
  config->state_dir = absl::GetFlag(FLAGS_state_dir);
  if (!config->state_dir.empty() && config->workers == 0) {
    return InvalidField("state_dir",
                        "needs worker processes (workers): embedded ones end with the coordinator");
  }
  config->worker_listen = absl::GetFlag(FLAGS_worker_listen);
  if (config->workers > 0) {
    TRIBUTARY_RETURN_IF_ERROR(CheckAddress("worker_listen", config->worker_listen));
  }
  if (!Parse(absl::GetFlag(FLAGS_device), &config->device)) {
    return InvalidField(
        "device", absl::StrCat("must be cpu or cuda, is '", absl::GetFlag(FLAGS_device), "'"));
  }
  TRIBUTARY_RETURN_IF_ERROR(ReadReplicas(config));
  TRIBUTARY_ASSIGN_OR_RETURN(config->first_gpu,
                             AtLeast("first_gpu", absl::GetFlag(FLAGS_first_gpu), 0));
  config->deterministic = absl::GetFlag(FLAGS_deterministic);
  TRIBUTARY_ASSIGN_OR_RETURN(config->threads, AtLeast("threads", absl::GetFlag(FLAGS_threads), 0));
  if (config->threads > kMostThreads) {
    return InvalidField("threads", absl::StrCat("must be at most ", kMostThreads));
  }
  const std::string exchange = absl::GetFlag(FLAGS_exchange);
  if (!collective::Parse(exchange, &config->exchange)) {
    return InvalidField(
        "exchange",
        absl::StrCat("must be auto, all_gather, ag_rs, a2a or direct, is '", exchange, "'"));
  }
  const std::string place = absl::GetFlag(FLAGS_device_exchange);
  if (!worker::Parse(place, &config->device_exchange)) {
    return InvalidField("device_exchange", absl::StrCat("must be host or auto, is '", place, "'"));
  }
  return worker::CheckExchange(config->device, config->exchange, config->device_exchange);
}

absl::Status ReadListeners(Config* config) {
  config->listen = absl::GetFlag(FLAGS_listen);
  if (config->listen.empty()) return InvalidField("listen", "must not be empty");
  for (const std::string& address : config->listen) {
    TRIBUTARY_RETURN_IF_ERROR(CheckAddress("listen", address));
  }
  const std::string mode = absl::GetFlag(FLAGS_socket_mode);
  const auto [end, error] =
      std::from_chars(mode.data(), mode.data() + mode.size(), config->socket_mode, 8);
  // Four digits, so that a number which some other reader of YAML took for decimal opens nothing.
  if (mode.size() != 4 || mode.front() != '0' || error != std::errc() ||
      end != mode.data() + mode.size()) {
    return InvalidField("socket_mode",
                        absl::StrCat("must be four octal digits, 0000 to 0777, is '", mode, "'"));
  }
  config->admin_listen = absl::GetFlag(FLAGS_admin_listen);
  if (!config->admin_listen.empty()) {
    TRIBUTARY_RETURN_IF_ERROR(CheckAddress("admin_listen", config->admin_listen));
  }
  config->metrics_port = absl::GetFlag(FLAGS_metrics_port);
  const int32_t port = config->metrics_port.value_or(0);
  if (port < 0 || port > 65535) {
    return InvalidField("metrics_port", absl::StrCat("must be 0 to 65535, is ", port));
  }
  config->reflection = absl::GetFlag(FLAGS_reflection);
  return absl::OkStatus();
}

// Beyond this machine everybody could read the cache and write to it.
absl::Status CheckReach(const Config& config, absl::string_view name, absl::string_view address) {
  if (absl::GetFlag(FLAGS_insecure) || !config.tls.certificate.empty() || IsLocalAddress(address)) {
    return absl::OkStatus();
  }
  return InvalidField(
      name, absl::StrCat("'", address,
                         "' is reached from beyond this machine; give tls_cert and tls_key, or "
                         "insecure if the network is to be trusted"));
}

// A name of a POSIX object is '/' and a name without further '/' (service/data/shared_memory.cc).
// No name begins with a prefix of another form, and every name with an empty one.
absl::Status CheckObjectPrefixes(absl::string_view flag, const std::vector<std::string>& prefixes) {
  for (const std::string& prefix : prefixes) {
    if (prefix.empty() || prefix[0] != '/' || prefix.find('/', 1) != std::string::npos) {
      return InvalidField(flag, absl::StrCat("each must be '/', or '/' and the beginning of a name "
                                             "without further '/', is '",
                                             prefix, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadAccess(Config* config) {
  config->tls = {.certificate = absl::GetFlag(FLAGS_tls_cert),
                 .key = absl::GetFlag(FLAGS_tls_key),
                 .authorities = absl::GetFlag(FLAGS_tls_client_ca)};
  TRIBUTARY_RETURN_IF_ERROR(CheckTlsFiles(config->tls, "tls_", "tls_client_ca"));
  if (config->tls.certificate.empty() && !config->tls.authorities.empty()) {
    return InvalidField("tls_client_ca", "needs tls_cert and tls_key");
  }
  const AccessOptions access = {.token_file = absl::GetFlag(FLAGS_token_file),
                                .client_names = absl::GetFlag(FLAGS_client_san),
                                .worker_names = absl::GetFlag(FLAGS_worker_san),
                                .admin_names = absl::GetFlag(FLAGS_admin_san)};
  const bool names =
      !access.client_names.empty() || !access.worker_names.empty() || !access.admin_names.empty();
  if (names && config->tls.authorities.empty()) {
    return InvalidField("tls_client_ca",
                        "is missing: names in certificates count only when the "
                        "certificates are checked");
  }
  TRIBUTARY_ASSIGN_OR_RETURN(config->access, AccessControl::Create(access));
  config->shared_memory_prefixes = absl::GetFlag(FLAGS_shared_memory_prefixes);
  TRIBUTARY_RETURN_IF_ERROR(
      CheckObjectPrefixes("shared_memory_prefixes", config->shared_memory_prefixes));
  config->shared_memory_from_anywhere = absl::GetFlag(FLAGS_shared_memory_from_anywhere);
  const std::string join_secret_file = absl::GetFlag(FLAGS_join_secret_file);
  if (!join_secret_file.empty()) {
    TRIBUTARY_ASSIGN_OR_RETURN(config->join_secret, JoinSecret::Create(join_secret_file));
  }
  for (const std::string& address : config->listen) {
    TRIBUTARY_RETURN_IF_ERROR(CheckReach(*config, "listen", address));
  }
  if (config->workers > 0) return CheckReach(*config, "worker_listen", config->worker_listen);
  return absl::OkStatus();
}

absl::Status ReadClientLimits(Config* config) {
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_calls_per_client,
      AtLeast("max_calls_per_client", absl::GetFlag(FLAGS_max_calls_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(config->max_sequences_per_client,
                             AtLeast("max_sequences_per_client",
                                     absl::GetFlag(FLAGS_max_sequences_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_pages_per_client,
      AtLeast("max_pages_per_client", absl::GetFlag(FLAGS_max_pages_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_streams_per_client,
      AtLeast("max_streams_per_client", absl::GetFlag(FLAGS_max_streams_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_bytes_per_client,
      AtLeast("max_bytes_per_client", absl::GetFlag(FLAGS_max_bytes_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_bytes_in_flight,
      AtLeast("max_bytes_in_flight", absl::GetFlag(FLAGS_max_bytes_in_flight), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_caches_per_client,
      AtLeast("max_caches_per_client", absl::GetFlag(FLAGS_max_caches_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(config->max_cache_bytes_per_client,
                             AtLeast("max_cache_bytes_per_client",
                                     absl::GetFlag(FLAGS_max_cache_bytes_per_client), int64_t{0}));
  return absl::OkStatus();
}

absl::Status ReadSessionLimits(Config* config) {
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_sessions, AtLeast("max_sessions", absl::GetFlag(FLAGS_max_sessions), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_sessions_per_client,
      AtLeast("max_sessions_per_client", absl::GetFlag(FLAGS_max_sessions_per_client), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_mailbox_bytes,
      AtLeast("max_mailbox_bytes", absl::GetFlag(FLAGS_max_mailbox_bytes), int64_t{0}));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_mailbox_bytes_per_client,
      AtLeast("max_mailbox_bytes_per_client", absl::GetFlag(FLAGS_max_mailbox_bytes_per_client),
              int64_t{0}));
  const absl::Duration spin = absl::GetFlag(FLAGS_session_spin);
  if (spin < absl::ZeroDuration() || spin > absl::Milliseconds(10)) {
    return InvalidField("session_spin",
                        absl::StrCat("must be 0 to 10ms, is ", absl::FormatDuration(spin)));
  }
  config->session_spin = absl::ToChronoNanoseconds(spin);
  return absl::OkStatus();
}

absl::Status ReadTimeouts(Config* config) {
  TRIBUTARY_ASSIGN_OR_RETURN(config->step_timeout,
                             Positive("step_timeout", absl::GetFlag(FLAGS_step_timeout)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->form_timeout,
                             Positive("form_timeout", absl::GetFlag(FLAGS_form_timeout)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->max_call_timeout,
                             Positive("max_call_timeout", absl::GetFlag(FLAGS_max_call_timeout)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->drain_timeout,
                             Positive("drain_timeout", absl::GetFlag(FLAGS_drain_timeout)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->drain_settle,
                             Positive("drain_settle", absl::GetFlag(FLAGS_drain_settle)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->reply_timeout,
                             Positive("reply_timeout", absl::GetFlag(FLAGS_reply_timeout)));
  TRIBUTARY_ASSIGN_OR_RETURN(config->retry_delay,
                             Positive("retry_delay", absl::GetFlag(FLAGS_retry_delay)));
  const absl::Duration window = absl::GetFlag(FLAGS_batch_window);
  if (window < absl::ZeroDuration() || window > absl::Seconds(1)) {
    return InvalidField("batch_window",
                        absl::StrCat("must be 0 to 1s, is ", absl::FormatDuration(window)));
  }
  config->batch_window = absl::ToChronoMicroseconds(window);
  return absl::OkStatus();
}

absl::Status ReadLimits(Config* config) {
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_message_bytes,
      AtLeast("max_message_bytes", absl::GetFlag(FLAGS_max_message_bytes), int64_t{4096}));
  if (config->max_message_bytes > std::numeric_limits<int32_t>::max()) {
    return InvalidField("max_message_bytes", "must be at most 2^31 - 1");
  }
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->max_calls_per_stream,
      AtLeast("max_calls_per_stream", absl::GetFlag(FLAGS_max_calls_per_stream), 1));
  TRIBUTARY_ASSIGN_OR_RETURN(config->max_sequences,
                             AtLeast("max_sequences", absl::GetFlag(FLAGS_max_sequences), 1));
  const absl::Duration lease_timeout = absl::GetFlag(FLAGS_lease_timeout);
  const bool allowed =
      lease_timeout == absl::ZeroDuration() ||
      (lease_timeout >= absl::Milliseconds(1) && lease_timeout <= absl::Hours(24 * 365));
  if (!allowed) return InvalidField("lease_timeout", "must be 0, or 1ms to 8760h");
  config->lease_timeout = absl::ToChronoMilliseconds(lease_timeout);
  TRIBUTARY_ASSIGN_OR_RETURN(config->batch_max_rows,
                             AtLeast("batch_max_rows", absl::GetFlag(FLAGS_batch_max_rows), 1));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->batch_max_entries,
      AtLeast("batch_max_entries", absl::GetFlag(FLAGS_batch_max_entries), 1));
  TRIBUTARY_ASSIGN_OR_RETURN(config->pipeline_depth,
                             AtLeast("pipeline_depth", absl::GetFlag(FLAGS_pipeline_depth), 1));
  TRIBUTARY_ASSIGN_OR_RETURN(
      config->memory_limit_bytes,
      AtLeast("memory_limit", absl::GetFlag(FLAGS_memory_limit), int64_t{0}));
  return absl::OkStatus();
}

absl::Status ReadLogging(Config* config) {
  if (!telemetry::Parse(absl::GetFlag(FLAGS_log_level), &config->log_level)) {
    return InvalidField("log_level", "must be debug, info, warning or error");
  }
  if (!telemetry::Parse(absl::GetFlag(FLAGS_log_format), &config->log_format)) {
    return InvalidField("log_format", "must be text or json");
  }
  config->trace_file = absl::GetFlag(FLAGS_trace_file);
  config->trace_sample = absl::GetFlag(FLAGS_trace_sample);
  if (!(config->trace_sample >= 0 && config->trace_sample <= 1)) {
    return InvalidField("trace_sample", absl::StrCat("must be 0 to 1, is ", config->trace_sample));
  }
  TRIBUTARY_ASSIGN_OR_RETURN(config->trace_spans,
                             AtLeast("trace_spans", absl::GetFlag(FLAGS_trace_spans), 0));
  if (config->trace_spans > 10'000'000) {
    return InvalidField("trace_spans", "must be at most 10000000");
  }
  config->otlp = {.endpoint = absl::GetFlag(FLAGS_otlp_endpoint),
                  .interval = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_otlp_interval)),
                  .authorities = absl::GetFlag(FLAGS_otlp_ca),
                  .headers_file = absl::GetFlag(FLAGS_otlp_headers_file)};
  return telemetry::CheckOtlp(config->otlp);
}

}  // namespace

bool PrintsHelp(int argc, char** argv) {
  return tributary::PrintsHelp(argc, argv, kUsage, "service/config.cc");
}

absl::StatusOr<Config> LoadConfig(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_helpshort_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "service/config.cc");
  };
  absl::SetFlagsUsageConfig(usage);
  TRIBUTARY_RETURN_IF_ERROR(ParseCommandLine(argc, argv));

  Config config;
  TRIBUTARY_RETURN_IF_ERROR(ReadListeners(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadWorkers(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadAccess(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadClientLimits(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadSessionLimits(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadTimeouts(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadLimits(&config));
  TRIBUTARY_RETURN_IF_ERROR(ReadLogging(&config));
  return config;
}

}  // namespace tributary::service
