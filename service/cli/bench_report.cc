#include "service/cli/bench_report.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/telemetry/json_string.h"
#include "service/cli/interval.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

constexpr std::pair<const char*, double> kPercentiles[] = {
    {"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99.9", 0.999}, {"max", 1.0}};

double PerSecond(const LoadResult& result, double amount) {
  return result.seconds > 0 ? amount / result.seconds : 0;
}

// "128", or "192/128" where values have dimensions of their own.
std::string HeadDims(const LoadOptions& o) {
  return o.value_head_dim == 0 ? absl::StrCat(o.head_dim)
                               : absl::StrCat(o.head_dim, "/", o.value_head_dim);
}

// How they travel.
std::string Tensors(const LoadOptions& o) {
  if (o.session) {
    return o.session_memory == v1::SESSION_MEMORY_DEVICE ? ", session on a GPU" : ", session";
  }
  return o.shared_memory_bytes > 0 ? ", shared memory" : ", inline";
}

std::string SetUp(const LoadOptions& o, const LoadResult& r, bool embedded, const Style& style) {
  const int loops = o.sequences / o.batch;
  return absl::StrCat(style.Bold(embedded ? "embedded service" : o.target), ", ", r.cache.ranks(),
                      " x ", r.cache.backend(), "\n", "cache     ", o.layers, " layers, ",
                      o.q_heads, "/", o.kv_heads, " heads, dim ", HeadDims(o), ", ",
                      Name(o.kv_dtype), ", page ", r.cache.spec().page_size(), ", interleave ",
                      r.cache.spec().interleave(), "\n", "load      ", loops, " loops on ",
                      o.connections, " connections, batch ", o.batch, ", ", o.rows,
                      " rows, context ", Count(o.context), ", ", Name(o.dtype), Tensors(o), "\n");
}

std::string Throughput(const LoadResult& r) {
  return absl::StrCat("measured  ", Seconds(r.seconds), ": ",
                      Rate(PerSecond(r, static_cast<double>(r.tokens))), " tokens/s, ",
                      Rate(PerSecond(r, static_cast<double>(r.requests))), " requests/s, KV read ",
                      Bytes(PerSecond(r, r.kv_bytes_read)), "/s\n");
}

using NamedLatencies = std::vector<std::pair<const char*, Latencies*>>;

NamedLatencies PhasesOf(LayerBreakdown& times) {
  return {{"fill", &times.fill},           {"ring seen", &times.ring_seen},
          {"attention", &times.attention}, {"exchange", &times.exchange},
          {"ring back", &times.ring_back}, {"wait", &times.wait}};
}

std::string Percentiles(const char* heading, const NamedLatencies& rows, const Style& style) {
  std::vector<Table::Column> columns = {
      {heading}, {"COUNT", Align::kRight}, {"MEAN", Align::kRight}};
  for (const auto& [name, fraction] : kPercentiles) columns.push_back({name, Align::kRight});
  Table table(columns);
  for (const auto& [what, of_row] : rows) {
    Latencies& latencies = *of_row;
    std::vector<std::string> cells = {what, Count(static_cast<int64_t>(latencies.count())),
                                      latencies.count() == 0 ? "-" : Seconds(latencies.Mean())};
    for (const auto& [title, fraction] : kPercentiles) {
      cells.push_back(latencies.count() == 0 ? "-" : Seconds(latencies.Percentile(fraction)));
    }
    table.AddRow(std::move(cells));
  }
  return table.Render(style);
}

std::string Breakdown(LayerBreakdown& times, const Style& style) {
  if (times.empty()) return "";
  return absl::StrCat("\n", Percentiles("A LAYER ON THE GPUS", PhasesOf(times), style));
}

std::string ServiceShare(const v1::Statistics& s, const Style& style) {
  if (s.steps() == 0) return "";
  Table table(PhaseColumns({{"IN THE SERVICE"}, {"REQUESTS/STEP", Align::kRight}}));
  std::vector<std::string> cells = Interval(v1::Statistics(), s, 0).PhaseMeans();
  const double calls = static_cast<double>(s.requests()) / static_cast<double>(s.steps());
  cells.insert(cells.begin(), {"mean", Rate(calls)});
  table.AddRow(std::move(cells));
  return absl::StrCat("\n", table.Render(style));
}

std::string Errors(const LoadResult& r, const Style& style) {
  if (r.errors.empty()) return absl::StrCat("\n", style.Green("no errors"), "\n");
  std::string out = "\n";
  for (const auto& [code, count] : r.errors) {
    absl::StrAppend(&out, style.Red(absl::StrCat(Count(static_cast<int64_t>(count)), " x ", code)),
                    "\n");
  }
  return absl::StrCat(out, "first: ", r.first_error, "\n");
}

// A JSON object from members that are JSON already.
std::string Object(const std::vector<std::pair<std::string, std::string>>& members) {
  return absl::StrCat("{",
                      absl::StrJoin(members, ", ",
                                    [](std::string* out, const auto& member) {
                                      absl::StrAppend(out, telemetry::JsonString(member.first),
                                                      ": ", member.second);
                                    }),
                      "}");
}

std::string Number(double value) { return absl::StrFormat("%.9g", value); }

std::string LatencyJson(Latencies& latencies) {
  std::vector<std::pair<std::string, std::string>> members = {
      {"count", absl::StrCat(latencies.count())}, {"mean", Number(latencies.Mean())}};
  for (const auto& [title, fraction] : kPercentiles) {
    members.emplace_back(title, Number(latencies.Percentile(fraction)));
  }
  return Object(members);
}

}  // namespace

std::string BenchReport(const LoadOptions& options, LoadResult& result, bool embedded,
                        const Style& style) {
  return absl::StrCat(SetUp(options, result, embedded, style), Throughput(result), "\n",
                      Percentiles("LATENCY",
                                  {{"request (one layer)", &result.request_latency},
                                   {"step (all layers)", &result.step_latency}},
                                  style),
                      Breakdown(result.breakdown, style), ServiceShare(result.service, style),
                      Errors(result, style));
}

std::string BenchJson(const LoadOptions& o, LoadResult& r) {
  std::vector<std::pair<std::string, std::string>> errors;
  for (const auto& [code, count] : r.errors) errors.emplace_back(code, absl::StrCat(count));
  const std::string load = Object({{"connections", absl::StrCat(o.connections)},
                                   {"sequences", absl::StrCat(o.sequences)},
                                   {"batch", absl::StrCat(o.batch)},
                                   {"rows", absl::StrCat(o.rows)},
                                   {"layers", absl::StrCat(o.layers)},
                                   {"context", absl::StrCat(o.context)},
                                   {"q_heads", absl::StrCat(o.q_heads)},
                                   {"kv_heads", absl::StrCat(o.kv_heads)},
                                   {"head_dim", absl::StrCat(o.head_dim)},
                                   {"value_head_dim", absl::StrCat(o.value_head_dim)},
                                   {"dtype", telemetry::JsonString(Name(o.dtype))},
                                   {"kv_dtype", telemetry::JsonString(Name(o.kv_dtype))},
                                   {"shared_memory", o.shared_memory_bytes > 0 ? "true" : "false"},
                                   {"session", o.session ? "true" : "false"},
                                   {"ranks", absl::StrCat(r.cache.ranks())},
                                   {"backend", telemetry::JsonString(r.cache.backend())}});
  const std::string service = Object({{"steps", absl::StrCat(r.service.steps())},
                                      {"requests", absl::StrCat(r.service.requests())},
                                      {"queue_seconds", Number(r.service.queue_seconds())},
                                      {"plan_seconds", Number(r.service.plan_seconds())},
                                      {"append_seconds", Number(r.service.append_seconds())},
                                      {"attend_seconds", Number(r.service.attend_seconds())},
                                      {"exchange_seconds", Number(r.service.exchange_seconds())}});
  std::vector<std::pair<std::string, std::string>> breakdown;
  if (!r.breakdown.empty()) {
    for (const auto& [phase, latencies] : PhasesOf(r.breakdown)) {
      breakdown.emplace_back(absl::StrReplaceAll(phase, {{" ", "_"}}), LatencyJson(*latencies));
    }
  }
  return absl::StrCat(
      Object({{"load", load},
              {"seconds", Number(r.seconds)},
              {"requests", absl::StrCat(r.requests)},
              {"steps", absl::StrCat(r.steps)},
              {"tokens", absl::StrCat(r.tokens)},
              {"requests_per_second", Number(PerSecond(r, static_cast<double>(r.requests)))},
              {"tokens_per_second", Number(PerSecond(r, static_cast<double>(r.tokens)))},
              {"kv_bytes_read_per_second", Number(PerSecond(r, r.kv_bytes_read))},
              {"request_latency_seconds", LatencyJson(r.request_latency)},
              {"step_latency_seconds", LatencyJson(r.step_latency)},
              {"breakdown_seconds", Object(breakdown)},
              {"service", service},
              {"errors", Object(errors)},
              {"first_error", telemetry::JsonString(r.first_error)}}),
      "\n");
}

}  // namespace tributary::cli
