// Sends spans and metrics to an OpenTelemetry collector, as OTLP over HTTP in JSON.
//
// A thread of its own looks every interval at what is new. Nobody who records a span or a metric
// waits for it, and a collector that is slow or away costs spans, never calls: what the buffer of
// spans has overwritten meanwhile is not sent.
#pragma once

#include <prometheus/collectable.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "base/telemetry/log.h"
#include "base/telemetry/otlp_json.h"
#include "base/telemetry/otlp_options.h"
#include "base/telemetry/trace.h"

namespace tributary::telemetry {

// This process: its host's name, and an id that no other process has.
OtlpResource ResourceOf(std::string service, std::string version);

class OtlpExporter {
 public:
  // `spans` may be null. The collectables must live as long as the exporter. Null when the endpoint
  // is empty.
  static absl::StatusOr<std::unique_ptr<OtlpExporter>> Start(
      const OtlpOptions& options, OtlpResource resource, std::shared_ptr<const TraceBuffer> spans,
      std::vector<std::shared_ptr<prometheus::Collectable>> metrics,
      std::shared_ptr<const Logger> log);
  // Sends what is new once more.
  ~OtlpExporter();
  OtlpExporter(const OtlpExporter&) = delete;
  OtlpExporter& operator=(const OtlpExporter&) = delete;

 private:
  class Connection;

  OtlpExporter(const OtlpOptions& options, OtlpResource resource,
               std::shared_ptr<const TraceBuffer> spans,
               std::vector<std::shared_ptr<prometheus::Collectable>> metrics,
               std::shared_ptr<const Logger> log);
  void Run();
  absl::Status SendAll();
  absl::Status SendSpans();
  absl::Status SendMetrics();
  // Logs when sending begins to fail, and when it works again.
  void Report(const absl::Status& status);

  const OtlpOptions options_;
  const OtlpResource resource_;
  const std::shared_ptr<const TraceBuffer> spans_;
  const std::vector<std::shared_ptr<prometheus::Collectable>> metrics_;
  const std::shared_ptr<const Logger> log_;
  const std::chrono::nanoseconds started_;  // since 1970
  // Of the exporter's thread.
  std::unique_ptr<Connection> connection_;
  uint64_t seen_ = 0;  // spans that were sent, or could not be
  bool failing_ = false;

  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  CondVar wake_;
  std::thread thread_;
};

}  // namespace tributary::telemetry
