// Where spans and metrics are sent to, as flags say it (otlp_exporter.h).
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tributary::telemetry {

struct OtlpOptions {
  // http://HOST:PORT or https://...; the paths /v1/traces and /v1/metrics are added. Empty: nothing
  // is sent.
  std::string endpoint;
  std::chrono::milliseconds interval{10'000};
  // How long one request may take. The end of the process waits for three of them, 2 s each at
  // most.
  std::chrono::milliseconds timeout{5'000};
  // A PEM file with who signed the collector's certificate; empty: the system's authorities.
  std::string authorities;
  // A file with headers that each request carries, one "Name: value" per line, such as
  // authorization. It is read again for each request.
  std::string headers_file;
};

// INVALID_ARGUMENT names the flag (otlp_endpoint, otlp_ca, otlp_interval or otlp_headers_file).
absl::Status CheckOtlp(const OtlpOptions& options);

// The lines of OtlpOptions::headers_file; none when the file's name is empty.
absl::StatusOr<std::vector<std::string>> ReadOtlpHeaders(const std::string& file);

}  // namespace tributary::telemetry
