#include "base/telemetry/otlp_options.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status/errors.h"

namespace tributary::telemetry {
namespace {

// Whether "http://host:port/path" stays on this machine, by its spelling.
bool IsThisMachine(absl::string_view endpoint) {
  absl::ConsumePrefix(&endpoint, "http://");
  const absl::string_view authority = endpoint.substr(0, endpoint.find('/'));
  if (absl::StartsWith(authority, "[")) return absl::StartsWith(authority, "[::1]");
  const absl::string_view host = authority.substr(0, authority.find(':'));
  return host == "localhost" ||
         (absl::StartsWith(host, "127.") && host.find_first_not_of("0123456789.") == host.npos);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ReadOtlpHeaders(const std::string& file) {
  std::vector<std::string> headers;
  if (file.empty()) return headers;
  std::ifstream in(file);
  if (!in) return InvalidField("otlp_headers_file", absl::StrCat("cannot read ", file));
  for (std::string line; std::getline(in, line);) {
    absl::StripAsciiWhitespace(&line);
    if (line.empty()) continue;
    if (!absl::StrContains(line, ':')) {
      return InvalidField("otlp_headers_file", "has a line that is not 'Name: value'");
    }
    headers.push_back(line);
  }
  return headers;
}

absl::Status CheckOtlp(const OtlpOptions& options) {
  const bool plain = absl::StartsWith(options.endpoint, "http://");
  if (options.endpoint.empty()) {
    if (options.authorities.empty() && options.headers_file.empty()) return absl::OkStatus();
    return InvalidField("otlp_endpoint", "is missing; otlp_ca or otlp_headers_file is given");
  }
  if (!plain && !absl::StartsWith(options.endpoint, "https://")) {
    return InvalidField("otlp_endpoint", absl::StrCat("must begin with http:// or https://, is '",
                                                      options.endpoint, "'"));
  }
  if (plain && !options.authorities.empty()) {
    return InvalidField("otlp_ca", "is of no use: otlp_endpoint is plain text");
  }
  if (options.interval < std::chrono::milliseconds(100) ||
      options.interval > std::chrono::hours(24)) {
    return InvalidField("otlp_interval", "must be 100ms to 24h");
  }
  if (plain && !options.headers_file.empty() && !IsThisMachine(options.endpoint)) {
    return InvalidField("otlp_headers_file",
                        "would be sent in plain text beyond this machine: use https://");
  }
  return ReadOtlpHeaders(options.headers_file).status();
}

}  // namespace tributary::telemetry
