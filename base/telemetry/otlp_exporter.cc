#include "base/telemetry/otlp_exporter.h"

#include <curl/curl.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status/status_macros.h"

namespace tributary::telemetry {
namespace {

// A collector takes messages of 4 MiB at least; a span has some 600 bytes.
constexpr size_t kSpansOfARequest = 2048;
// Of each request that the end of the process waits for.
constexpr std::chrono::milliseconds kLastTimeout{2'000};
// Of a refusal, what is told of it.
constexpr size_t kLongestAnswer = 512;

std::chrono::nanoseconds WallNow() { return std::chrono::system_clock::now().time_since_epoch(); }

}  // namespace

OtlpResource ResourceOf(std::string service, std::string version) {
  char host[256] = "";
  const bool known = gethostname(host, sizeof(host) - 1) == 0;
  std::random_device random;
  const uint64_t id = (uint64_t{random()} << 32) | random();
  return {.service = std::move(service),
          .version = std::move(version),
          .instance = absl::StrCat(absl::Hex(id, absl::kZeroPad16)),
          .host = known ? host : ""};
}

// One connection that is kept, and used by one thread.
class OtlpExporter::Connection {
 public:
  explicit Connection(const std::atomic<bool>& stopping) : stopping_(stopping) {
    // Counted, and undone by curl_global_cleanup; its first call must come before other threads
    // make theirs, and only exporters do.
    curl_global_init(CURL_GLOBAL_DEFAULT);
    curl_ = curl_easy_init();
  }
  ~Connection() {
    if (curl_ != nullptr) curl_easy_cleanup(curl_);
    curl_global_cleanup();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // OK when the collector has taken it. INVALID_ARGUMENT when it never will; any other error may
  // be different next time.
  absl::Status Post(const OtlpOptions& options, const char* path, const std::string& body);

 private:
  static size_t Keep(char* data, size_t, size_t bytes, void* answer) {
    auto& text = *static_cast<std::string*>(answer);
    text.append(data, std::min(bytes, kLongestAnswer - std::min(kLongestAnswer, text.size())));
    return bytes;
  }
  // Not 0 ends the request: the process is to end, and the request has had the time for that.
  static int GoesOn(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    auto& connection = *static_cast<Connection*>(self);
    if (!connection.stopping_.load()) return 0;
    const auto now = std::chrono::steady_clock::now();
    if (!connection.end_by_.has_value()) connection.end_by_ = now + kLastTimeout;
    return now > *connection.end_by_ ? 1 : 0;
  }

  const std::atomic<bool>& stopping_;
  // Of the request under way, once the process is to end.
  std::optional<std::chrono::steady_clock::time_point> end_by_;
  CURL* curl_ = nullptr;
};

absl::Status OtlpExporter::Connection::Post(const OtlpOptions& options, const char* path,
                                            const std::string& body) {
  if (curl_ == nullptr) return absl::InternalError("libcurl cannot be used");
  absl::StatusOr<std::vector<std::string>> read = ReadOtlpHeaders(options.headers_file);
  // The file may be there again next time.
  if (!read.ok()) return absl::UnavailableError(read.status().message());
  std::vector<std::string> headers = *std::move(read);
  headers.emplace_back("Content-Type: application/json");
  headers.emplace_back("Expect:");  // no pause before a body of more than a KiB
  curl_slist* list = nullptr;
  for (const std::string& header : headers) list = curl_slist_append(list, header.c_str());
  const std::string url = absl::StrCat(absl::StripSuffix(options.endpoint, "/"), path);
  std::string answer;
  char error[CURL_ERROR_SIZE] = "";
  end_by_.reset();
  curl_easy_reset(curl_);
  curl_easy_setopt(curl_, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl_, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl_, CURLOPT_NOSIGNAL, 1L);  // this process has threads
  curl_easy_setopt(curl_, CURLOPT_HTTPHEADER, list);
  curl_easy_setopt(curl_, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
  curl_easy_setopt(curl_, CURLOPT_POSTFIELDS, body.c_str());
  curl_easy_setopt(curl_, CURLOPT_TIMEOUT_MS, static_cast<long>(options.timeout.count()));
  curl_easy_setopt(curl_, CURLOPT_WRITEFUNCTION, &Connection::Keep);
  curl_easy_setopt(curl_, CURLOPT_WRITEDATA, &answer);
  curl_easy_setopt(curl_, CURLOPT_ERRORBUFFER, error);
  curl_easy_setopt(curl_, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl_, CURLOPT_XFERINFOFUNCTION, &Connection::GoesOn);
  curl_easy_setopt(curl_, CURLOPT_XFERINFODATA, this);
  if (!options.authorities.empty()) {
    curl_easy_setopt(curl_, CURLOPT_CAINFO, options.authorities.c_str());
  }
  const CURLcode code = curl_easy_perform(curl_);
  long status = 0;
  curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &status);
  curl_slist_free_all(list);
  if (code != CURLE_OK) {
    const char* reason = error[0] != '\0' ? error : curl_easy_strerror(code);
    return absl::UnavailableError(absl::StrCat(url, ": ", reason));
  }
  if (status >= 200 && status < 300) return absl::OkStatus();
  const std::string refusal = absl::StrCat(url, ": HTTP ", status, " ", answer);
  // The specification's list of what is worth another try.
  const bool again = status == 429 || status == 502 || status == 503 || status == 504;
  return again ? absl::UnavailableError(refusal) : absl::InvalidArgumentError(refusal);
}

OtlpExporter::OtlpExporter(const OtlpOptions& options, OtlpResource resource,
                           std::shared_ptr<const TraceBuffer> spans,
                           std::vector<std::shared_ptr<prometheus::Collectable>> metrics,
                           std::shared_ptr<const Logger> log)
    : options_(options),
      resource_(std::move(resource)),
      spans_(std::move(spans)),
      metrics_(std::move(metrics)),
      log_(std::move(log)),
      started_(WallNow()),
      connection_(std::make_unique<Connection>(stopping_)) {}

absl::StatusOr<std::unique_ptr<OtlpExporter>> OtlpExporter::Start(
    const OtlpOptions& options, OtlpResource resource, std::shared_ptr<const TraceBuffer> spans,
    std::vector<std::shared_ptr<prometheus::Collectable>> metrics,
    std::shared_ptr<const Logger> log) {
  TRIBUTARY_RETURN_IF_ERROR(CheckOtlp(options));
  if (options.endpoint.empty()) return nullptr;
  std::unique_ptr<OtlpExporter> exporter(new OtlpExporter(
      options, std::move(resource), std::move(spans), std::move(metrics), std::move(log)));
  exporter->thread_ = std::thread([e = exporter.get()] { e->Run(); });
  return exporter;
}

OtlpExporter::~OtlpExporter() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  thread_.join();
}

void OtlpExporter::Run() {
  for (bool last = false; !last;) {
    {
      const auto until = std::chrono::steady_clock::now() + options_.interval;
      MutexLock lock(mutex_);
      while (!stopping_ && wake_.WaitUntil(mutex_, until)) {
      }
      last = stopping_;
    }
    Report(SendAll());
  }
}

absl::Status OtlpExporter::SendAll() {
  const absl::Status spans = SendSpans();
  // Where one could not be reached, the other would only take as long to fail.
  if (absl::IsUnavailable(spans)) return spans;
  absl::Status metrics = SendMetrics();
  return metrics.ok() ? spans : metrics;
}

absl::Status OtlpExporter::SendSpans() {
  if (spans_ == nullptr) return absl::OkStatus();
  uint64_t first = seen_;
  const std::vector<Span> spans = spans_->Since(&first);
  if (first > seen_) {
    log_->Info("otlp: spans were overwritten before they could be sent",
               {{"spans", first - seen_}});
    seen_ = first;
  }
  const auto to_wall = WallNow() - std::chrono::steady_clock::now().time_since_epoch();
  absl::Status outcome;
  for (size_t begin = 0; begin < spans.size(); begin += kSpansOfARequest) {
    const auto part = absl::MakeConstSpan(spans).subspan(begin, kSpansOfARequest);
    const absl::Status sent =
        connection_->Post(options_, "/v1/traces", OtlpTraces(resource_, part, to_wall));
    // What may go another time stays for that.
    if (!sent.ok() && !absl::IsInvalidArgument(sent)) return sent;
    outcome.Update(sent);
    seen_ += part.size();
  }
  return outcome;
}

absl::Status OtlpExporter::SendMetrics() {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collectable : metrics_) {
    for (prometheus::MetricFamily& family : collectable->Collect()) {
      families.push_back(std::move(family));
    }
  }
  if (families.empty()) return absl::OkStatus();
  return connection_->Post(options_, "/v1/metrics",
                           OtlpMetrics(resource_, families, started_, WallNow()));
}

void OtlpExporter::Report(const absl::Status& status) {
  if (status.ok() == !failing_) return;
  failing_ = !status.ok();
  if (!failing_) return log_->Info("otlp: spans and metrics are sent again");
  // The end of the process does not turn a collector that is away into a warning.
  const LogLevel level = stopping_ ? LogLevel::kInfo : LogLevel::kWarning;
  log_->Write(level, "otlp: spans and metrics cannot be sent", {{"error", status.message()}});
}

}  // namespace tributary::telemetry
