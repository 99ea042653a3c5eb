#include "base/telemetry/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/telemetry/json_string.h"
#include "base/telemetry/perfetto.h"

namespace tributary::telemetry {
namespace {

constexpr size_t kTraceparentLength = 55;

// Lower-case hex digits only, as the standard asks.
bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); });
}

uint64_t HexValue(absl::string_view text) {
  uint64_t value = 0;
  for (const char c : text) value = value * 16 + (c <= '9' ? c - '0' : c - 'a' + 10);
  return value;
}

// Viewers group by "process"; ours are the coordinator and the ranks.
int ProcessOf(const Track& track) { return track.kind == Track::kRank ? track.rank + 1 : 0; }

int64_t Microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

void AppendArguments(const Span& span, std::string* out) {
  absl::StrAppend(out, ",\"args\":{\"trace_id\":\"", TraceIdText(span.trace), "\",\"span_id\":\"",
                  absl::Hex(span.span_id, absl::kZeroPad16), "\",\"parent_span_id\":\"",
                  absl::Hex(span.trace.span_id, absl::kZeroPad16), "\"");
  for (const Span::Argument& argument : span.arguments) {
    if (argument.key != nullptr) absl::StrAppend(out, ",\"", argument.key, "\":", argument.value);
  }
  absl::StrAppend(out, "}");
}

// A rank does one thing at a time: complete events, which nest by time. Calls and steps overlap:
// asynchronous ones, which nest by id.
void AppendEvents(const Span& span, std::chrono::microseconds to_wall, std::string* out) {
  const int64_t begin = Microseconds(span.begin.time_since_epoch()) + to_wall.count();
  const int64_t length = std::max<int64_t>(Microseconds(span.end - span.begin), 0);
  const std::string place =
      absl::StrCat("\"name\":\"", span.name, "\",\"pid\":", ProcessOf(span.track), ",\"tid\":0");
  if (span.track.kind == Track::kRank) {
    absl::StrAppend(out, ",\n{\"ph\":\"X\",\"cat\":\"rank\",", place, ",\"ts\":", begin,
                    ",\"dur\":", length);
    AppendArguments(span, out);
    absl::StrAppend(out, "}");
    return;
  }
  const std::string common = absl::StrCat(
      "\"cat\":\"", span.track.kind == Track::kCalls ? "call" : "step", "\",\"id\":\"",
      absl::Hex(span.lane == 0 ? span.span_id : span.lane, absl::kZeroPad16), "\",", place);
  absl::StrAppend(out, ",\n{\"ph\":\"b\",", common, ",\"ts\":", begin);
  AppendArguments(span, out);
  absl::StrAppend(out, "},\n{\"ph\":\"e\",", common, ",\"ts\":", begin + length, "}");
}

}  // namespace

std::optional<TraceContext> ParseTraceparent(absl::string_view text) {
  if (text.size() < kTraceparentLength || text[2] != '-' || text[35] != '-' || text[52] != '-') {
    return std::nullopt;
  }
  const absl::string_view version = text.substr(0, 2), trace = text.substr(3, 32),
                          span = text.substr(36, 16), flags = text.substr(53, 2);
  if (!IsHex(version) || !IsHex(trace) || !IsHex(span) || !IsHex(flags) || version == "ff") {
    return std::nullopt;
  }
  const bool longer = text.size() > kTraceparentLength;
  if (longer && (version == "00" || text[kTraceparentLength] != '-')) return std::nullopt;
  TraceContext context;
  const std::string bytes = absl::HexStringToBytes(trace);
  std::copy(bytes.begin(), bytes.end(), context.trace_id.begin());
  context.span_id = HexValue(span);
  context.sampled = (HexValue(flags) & 1) != 0;
  const bool no_trace = context.trace_id == std::array<uint8_t, 16>{};
  if (no_trace || context.span_id == 0) return std::nullopt;
  return context;
}

std::string TraceIdText(const TraceContext& context) {
  return absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(context.trace_id.data()), context.trace_id.size()));
}

std::string FormatTraceparent(const TraceContext& context) {
  return absl::StrCat("00-", TraceIdText(context), "-",
                      absl::Hex(context.span_id, absl::kZeroPad16),
                      context.sampled ? "-01" : "-00");
}

TraceBuffer::TraceBuffer(size_t capacity, double sample_ratio, std::string process)
    : capacity_(capacity), sample_ratio_(sample_ratio), process_(std::move(process)) {
  std::random_device device;
  random_state_ = (uint64_t{device()} << 32) | device();
}

// SplitMix64: one atomic addition, and well-spread identifiers.
uint64_t TraceBuffer::Random() {
  uint64_t z = random_state_.fetch_add(0x9E3779B97F4A7C15, std::memory_order_relaxed);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t TraceBuffer::NewSpanId() {
  const uint64_t id = Random();
  return id == 0 ? 1 : id;
}

TraceContext TraceBuffer::Begin(std::optional<TraceContext> caller) {
  if (caller.has_value()) return *caller;
  TraceContext context;
  const double ratio = sample_ratio_.load(std::memory_order_relaxed);
  if (ratio <= 0) return context;
  constexpr double kScale = 1.0 / 18446744073709551616.0;  // 2^-64
  context.sampled = static_cast<double>(Random()) * kScale < ratio;
  if (!context.sampled) return context;
  for (size_t half = 0; half < 2; ++half) {
    const uint64_t bits = NewSpanId();
    std::memcpy(context.trace_id.data() + 8 * half, &bits, 8);
  }
  return context;
}

void TraceBuffer::Add(const Span& span) {
  if (capacity_ == 0) return;
  const MutexLock lock(mutex_);
  if (spans_.size() < capacity_) {
    spans_.push_back(span);
  } else {
    spans_[added_ % capacity_] = span;
  }
  ++added_;
}

std::vector<Span> TraceBuffer::Since(uint64_t* seen) const {
  std::vector<Span> since;
  const MutexLock lock(mutex_);
  *seen = std::max<uint64_t>(*seen, added_ - spans_.size());
  since.reserve(added_ - *seen);
  for (uint64_t i = *seen; i < added_; ++i) since.push_back(spans_[i % capacity_]);
  return since;
}

uint64_t TraceBuffer::dropped() const {
  const MutexLock lock(mutex_);
  return added_ - spans_.size();
}

std::string TraceBuffer::Json() const {
  std::vector<Span> spans;
  {
    const MutexLock lock(mutex_);
    spans = spans_;
  }
  // Wall time, so that the files of several processes can be laid on top of each other.
  const auto to_wall = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::system_clock::now().time_since_epoch() -
      std::chrono::steady_clock::now().time_since_epoch());
  std::set<int> processes;
  for (const Span& span : spans) processes.insert(ProcessOf(span.track));
  std::string out = absl::StrCat(
      "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"process\":", JsonString(process_),
      "},\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"args\":{\"name\":",
      JsonString(process_), "}}");
  for (const int process : processes) {
    if (process == 0) continue;
    absl::StrAppend(&out, ",\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", process,
                    ",\"args\":{\"name\":\"rank ", process - 1, "\"}}");
  }
  for (const Span& span : spans) AppendEvents(span, to_wall, &out);
  return absl::StrCat(out, "\n]}\n");
}

std::string TraceBuffer::Perfetto() const {
  uint64_t first = 0;
  std::vector<Span> spans = Since(&first);
  const std::chrono::nanoseconds to_wall = std::chrono::system_clock::now().time_since_epoch() -
                                           std::chrono::steady_clock::now().time_since_epoch();
  return PerfettoTrace(std::move(spans), process_, to_wall);
}

absl::Status TraceBuffer::WriteTo(const std::string& path) const {
  const std::string text = absl::EndsWith(path, ".json") ? Json() : Perfetto();
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write all of ", path));
}

}  // namespace tributary::telemetry
