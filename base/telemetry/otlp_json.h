// Bodies of OTLP/HTTP requests in JSON, which every OpenTelemetry collector takes at /v1/traces and
// /v1/metrics: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
#pragma once

#include <prometheus/metric_family.h>

#include <chrono>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "base/telemetry/trace.h"

namespace tributary::telemetry {

// Whose spans and metrics they are.
struct OtlpResource {
  std::string service;   // service.name: "tributary-coordinator"
  std::string version;   // service.version
  std::string instance;  // service.instance.id: no two processes have the same
  std::string host;      // host.name; empty: unknown
};

// `to_wall` is what a time of the spans' clock lacks to the time since 1970.
std::string OtlpTraces(const OtlpResource& resource, absl::Span<const Span> spans,
                       std::chrono::nanoseconds to_wall);

// Counters and histograms count since `start`. Both times are since 1970. Summaries, of which there
// are none here, are left out.
std::string OtlpMetrics(const OtlpResource& resource,
                        const std::vector<prometheus::MetricFamily>& families,
                        std::chrono::nanoseconds start, std::chrono::nanoseconds now);

}  // namespace tributary::telemetry
