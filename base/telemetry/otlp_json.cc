#include "base/telemetry/otlp_json.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tributary::telemetry {
namespace {

using Json = nlohmann::json;

// Numbers of the protocol's enums.
constexpr int kSpanInternal = 1;
constexpr int kSpanServer = 2;
constexpr int kStatusError = 2;
constexpr int kCumulative = 2;

// 64-bit numbers are strings in JSON, whose own numbers are doubles.
template <typename T>
std::string Number(T value) {
  return absl::StrCat(value);
}

Json Attribute(const std::string& key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}

Json Attribute(const std::string& key, int64_t value) {
  return {{"key", key}, {"value", {{"intValue", Number(value)}}}};
}

std::string SpanIdText(uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); }

// Names are byte strings that may come from a host; what is no UTF-8 becomes U+FFFD.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json ResourceJson(const OtlpResource& resource) {
  Json attributes = Json::array();
  attributes.push_back(Attribute("service.name", resource.service));
  attributes.push_back(Attribute("service.version", resource.version));
  attributes.push_back(Attribute("service.instance.id", resource.instance));
  if (!resource.host.empty()) attributes.push_back(Attribute("host.name", resource.host));
  return {{"attributes", std::move(attributes)}};
}

Json ScopeOf(const OtlpResource& resource) {
  return {{"name", "tributary"}, {"version", resource.version}};
}

// The codes by which a server's span counts as failed, as the conventions for RPCs have it.
bool IsError(int64_t code) {
  switch (static_cast<absl::StatusCode>(code)) {
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

Json SpanJson(const Span& span, std::chrono::nanoseconds to_wall) {
  // A call is a server's; what belongs to it lies in its lane.
  const bool is_call = span.track.kind == Track::kCalls && span.lane == 0;
  Json attributes = Json::array();
  if (is_call) {
    attributes.push_back(Attribute("rpc.system", std::string("grpc")));
    attributes.push_back(Attribute("rpc.service", std::string("tributary.v1.AttentionService")));
    attributes.push_back(Attribute("rpc.method", std::string(span.name)));
  }
  if (span.track.kind == Track::kRank) {
    attributes.push_back(Attribute("tributary.rank", int64_t{span.track.rank}));
  }
  Json status = Json::object();
  for (const Span::Argument& argument : span.arguments) {
    if (argument.key == nullptr) continue;
    const bool is_code = is_call && std::strcmp(argument.key, "code") == 0;
    attributes.push_back(
        Attribute(is_code ? "rpc.grpc.status_code" : absl::StrCat("tributary.", argument.key),
                  argument.value));
    if (is_code && IsError(argument.value)) status = {{"code", kStatusError}};
  }
  const auto wall = [to_wall](std::chrono::steady_clock::time_point time) {
    return Number(std::chrono::nanoseconds(time.time_since_epoch() + to_wall).count());
  };
  Json json = {{"traceId", TraceIdText(span.trace)},
               {"spanId", SpanIdText(span.span_id)},
               {"name", span.name},
               {"kind", is_call ? kSpanServer : kSpanInternal},
               {"startTimeUnixNano", wall(span.begin)},
               {"endTimeUnixNano", wall(std::max(span.begin, span.end))},
               {"attributes", std::move(attributes)},
               {"status", std::move(status)}};
  if (span.trace.span_id != 0) json["parentSpanId"] = SpanIdText(span.trace.span_id);
  return json;
}

// JSON has no infinity and no NaN; the protocol takes them as strings.
Json Value(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json PointOf(const prometheus::ClientMetric& metric, std::chrono::nanoseconds now) {
  Json attributes = Json::array();
  for (const auto& label : metric.label) attributes.push_back(Attribute(label.name, label.value));
  return {{"attributes", std::move(attributes)}, {"timeUnixNano", Number(now.count())}};
}

// Prometheus counts below each bound, OTLP between bounds; the last bound, infinity, goes unsaid.
void AddBuckets(const prometheus::ClientMetric::Histogram& histogram, Json* point) {
  Json counts = Json::array();
  Json bounds = Json::array();
  uint64_t before = 0;
  for (const auto& bucket : histogram.bucket) {
    counts.push_back(Number(bucket.cumulative_count - before));
    before = bucket.cumulative_count;
    if (!std::isinf(bucket.upper_bound)) bounds.push_back(bucket.upper_bound);
  }
  (*point)["count"] = Number(before);
  (*point)["sum"] = Value(histogram.sample_sum);
  (*point)["bucketCounts"] = std::move(counts);
  (*point)["explicitBounds"] = std::move(bounds);
}

Json MetricJson(const prometheus::MetricFamily& family, std::chrono::nanoseconds start,
                std::chrono::nanoseconds now) {
  Json points = Json::array();
  const bool gauge = family.type == prometheus::MetricType::Gauge;
  for (const prometheus::ClientMetric& metric : family.metric) {
    Json point = PointOf(metric, now);
    if (!gauge) point["startTimeUnixNano"] = Number(start.count());
    if (family.type == prometheus::MetricType::Histogram) {
      AddBuckets(metric.histogram, &point);
    } else {
      point["asDouble"] = Value(gauge ? metric.gauge.value : metric.counter.value);
    }
    points.push_back(std::move(point));
  }
  Json data = {{"dataPoints", std::move(points)}};
  if (!gauge) data["aggregationTemporality"] = kCumulative;
  const char* kind = "gauge";
  if (family.type == prometheus::MetricType::Counter) {
    kind = "sum";
    data["isMonotonic"] = true;
  } else if (family.type == prometheus::MetricType::Histogram) {
    kind = "histogram";
  }
  return {{"name", family.name}, {"description", family.help}, {kind, std::move(data)}};
}

}  // namespace

std::string OtlpTraces(const OtlpResource& resource, absl::Span<const Span> spans,
                       std::chrono::nanoseconds to_wall) {
  Json list = Json::array();
  for (const Span& span : spans) list.push_back(SpanJson(span, to_wall));
  Json scope = {{"scope", ScopeOf(resource)}, {"spans", std::move(list)}};
  Json of_resource = {{"resource", ResourceJson(resource)},
                      {"scopeSpans", Json::array({std::move(scope)})}};
  return Dump({{"resourceSpans", Json::array({std::move(of_resource)})}});
}

std::string OtlpMetrics(const OtlpResource& resource,
                        const std::vector<prometheus::MetricFamily>& families,
                        std::chrono::nanoseconds start, std::chrono::nanoseconds now) {
  Json list = Json::array();
  for (const prometheus::MetricFamily& family : families) {
    if (family.type == prometheus::MetricType::Summary || family.metric.empty()) continue;
    list.push_back(MetricJson(family, start, now));
  }
  Json scope = {{"scope", ScopeOf(resource)}, {"metrics", std::move(list)}};
  Json of_resource = {{"resource", ResourceJson(resource)},
                      {"scopeMetrics", Json::array({std::move(scope)})}};
  return Dump({{"resourceMetrics", Json::array({std::move(of_resource)})}});
}

}  // namespace tributary::telemetry
