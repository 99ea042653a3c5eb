// Traces: which call a span of time belongs to (W3C trace context), and a bounded buffer of spans
// that is written as Chrome trace JSON, which chrome://tracing and many others open, or in
// Perfetto's own format.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/sync/mutex.h"

namespace tributary::telemetry {

// https://www.w3.org/TR/trace-context/: the trace, the span that caused this one, and whether the
// trace is wanted.
struct TraceContext {
  std::array<uint8_t, 16> trace_id{};
  uint64_t span_id = 0;  // 0: no parent
  bool sampled = false;
};

// "00-<32 hex>-<16 hex>-<2 hex>"; nothing when it is not that. Later versions are read as far as
// this one goes, as the standard asks.
std::optional<TraceContext> ParseTraceparent(absl::string_view text);
std::string FormatTraceparent(const TraceContext& context);
std::string TraceIdText(const TraceContext& context);  // 32 hex digits

// Where a span is shown. Calls and steps may overlap; the spans of one rank never do.
struct Track {
  enum Kind : uint8_t { kCalls, kSteps, kRank };
  Kind kind = kCalls;
  int32_t rank = 0;
};

struct Span {
  struct Argument {
    const char* key = nullptr;  // a literal; null: none
    int64_t value = 0;
  };

  const char* name = "";  // a literal
  Track track;
  TraceContext trace;  // its span_id: the parent
  uint64_t span_id = 0;
  uint64_t lane = 0;  // calls and steps of one lane are shown nested; 0: a lane of its own
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
  std::array<Argument, 4> arguments{};
};

// The spans added last, up to a capacity. Threads may add and read at once.
class TraceBuffer {
 public:
  // `sample_ratio` of the calls that come without a trace get one. `process` is its name in
  // viewers.
  TraceBuffer(size_t capacity, double sample_ratio, std::string process);

  // From now on, on any thread.
  void SetSampleRatio(double ratio) { sample_ratio_.store(ratio, std::memory_order_relaxed); }

  // What a call is traced as: its caller's trace, or one of its own when it is picked.
  TraceContext Begin(std::optional<TraceContext> caller);
  uint64_t NewSpanId();
  void Add(const Span& span);

  // The spans added since the first `*seen` of all, oldest first. `*seen` is then how many were
  // added before the first of these: more than it was where some are no longer kept.
  std::vector<Span> Since(uint64_t* seen) const;

  // Spans dropped because newer ones took their place.
  uint64_t dropped() const;
  std::string Json() const;
  // In Perfetto's own format (perfetto.h).
  std::string Perfetto() const;
  // As JSON where the path ends with .json, else in Perfetto's own format.
  absl::Status WriteTo(const std::string& path) const;

 private:
  uint64_t Random();

  const size_t capacity_;
  std::atomic<double> sample_ratio_;
  const std::string process_;
  std::atomic<uint64_t> random_state_;

  mutable Mutex mutex_;
  std::vector<Span> spans_ TRIBUTARY_GUARDED_BY(mutex_);  // a ring once it is full
  uint64_t added_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
};

}  // namespace tributary::telemetry
