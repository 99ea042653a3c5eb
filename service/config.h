// The coordinator's settings: flags, and a YAML file of flags.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/tls.h"
#include "base/telemetry/log.h"
#include "base/telemetry/otlp_options.h"
#include "collective/exchange/exchange.h"
#include "service/access/access_control.h"
#include "service/access/join_secret.h"
#include "worker/backends.h"
#include "worker/exchange_choice.h"

namespace tributary::service {

// What --help says of each is in config.cc, where the flags are.
struct Config {
  std::vector<std::string> listen;
  mode_t socket_mode = 0;  // of Unix sockets among them
  std::string admin_listen;
  std::optional<int32_t> metrics_port;  // on the host of admin_listen; 0 picks one
  int32_t embedded_workers = 4;         // 0 when workers are remote
  int32_t workers = 0;                  // remote ones; 0 when they are embedded
  std::string worker_listen;
  worker::Device device = worker::Device::kCpu;
  int32_t first_gpu = 0;
  bool deterministic = false;
  int32_t threads = 0;
  collective::Strategy exchange = collective::Strategy::kAuto;
  worker::ExchangePlace device_exchange = worker::ExchangePlace::kAuto;
  std::chrono::milliseconds step_timeout{0};
  std::chrono::milliseconds form_timeout{0};
  std::chrono::milliseconds max_call_timeout{0};
  std::chrono::milliseconds drain_timeout{0};
  std::chrono::milliseconds drain_settle{0};
  std::chrono::milliseconds reply_timeout{0};
  std::chrono::milliseconds retry_delay{0};
  int64_t max_message_bytes = 0;
  int32_t max_calls_per_stream = 0;
  int32_t max_sequences = 0;
  int32_t batch_max_rows = 0;
  int32_t batch_max_entries = 0;
  std::chrono::microseconds batch_window{0};
  int32_t pipeline_depth = 0;
  int64_t memory_limit_bytes = 0;
  int64_t max_calls_per_client = 0;
  int64_t max_sequences_per_client = 0;
  int64_t max_pages_per_client = 0;
  int64_t max_caches_per_client = 0;
  int64_t max_streams_per_client = 0;
  int64_t max_bytes_per_client = 0;
  int64_t max_bytes_in_flight = 0;
  int64_t max_cache_bytes_per_client = 0;
  int64_t max_sessions = 0;
  int64_t max_sessions_per_client = 0;
  int64_t max_mailbox_bytes = 0;
  int64_t max_mailbox_bytes_per_client = 0;
  std::chrono::nanoseconds session_spin{0};
  std::vector<std::string> shared_memory_prefixes;
  bool shared_memory_from_anywhere = false;
  bool reflection = true;
  TlsFiles tls;
  std::shared_ptr<AccessControl> access;
  std::chrono::milliseconds lease_timeout{0};
  int32_t replicas = 0;                     // of caches that do not say
  std::string state_dir;                    // empty: nothing outlives the process
  std::shared_ptr<JoinSecret> join_secret;  // null: workers need not show one
  telemetry::LogLevel log_level = telemetry::LogLevel::kInfo;
  telemetry::LogFormat log_format = telemetry::LogFormat::kText;
  std::string trace_file;
  double trace_sample = 0;
  int32_t trace_spans = 0;  // 0: nothing is traced
  telemetry::OtlpOptions otlp;
};

// Command line and --config file; the command line wins. INVALID_ARGUMENT or NOT_FOUND names the
// setting at fault. --version, --helpfull and the like print and end the program.
absl::StatusOr<Config> LoadConfig(int argc, char** argv);

// Whether --help was asked for, and printed (base/config/flag_help.h).
bool PrintsHelp(int argc, char** argv);

}  // namespace tributary::service
