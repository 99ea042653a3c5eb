#include "service/cli/report.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "service/cli/dtype_name.h"
#include "service/cli/group_report.h"
#include "service/cli/interval.h"
#include "service/cli/session_report.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

// "128", or "192/128" where values have dimensions of their own.
std::string HeadDims(const v1::CacheSpec& spec) {
  return spec.value_head_dim() == 0 || spec.value_head_dim() == spec.head_dim()
             ? absl::StrCat(spec.head_dim())
             : absl::StrCat(spec.head_dim(), "/", spec.value_head_dim());
}

std::string Workers(const v1::GetTopologyReply& topology, const Style& style) {
  Table table(WorkerColumns(topology));
  for (const v1::WorkerInfo& worker : topology.workers()) {
    table.AddRow(WorkerCells(topology, worker, Seconds(worker.busy_seconds()), style));
  }
  return table.Render(style);
}

// Used and total, of the pages that only layers with a window use.
std::string WindowPages(const v1::CacheInfo& cache) {
  if (cache.window_pages_total() == 0) return "-";
  return absl::StrCat(Count(cache.window_pages_used()), " of ", Count(cache.window_pages_total()));
}

std::string Caches(const v1::GetTopologyReply& topology, const Style& style) {
  Table table({{"CACHE"},
               {"KV"},
               {"LAYERS", Align::kRight},
               {"HEADS", Align::kRight},
               {"DIM", Align::kRight},
               {"PAGE", Align::kRight},
               {"INTERLEAVE", Align::kRight},
               {"PAGES", Align::kRight},
               {"USED", Align::kRight},
               {"", Align::kRight},
               {"SHARED", Align::kRight},
               {"OF WINDOWS", Align::kRight},
               {"GIVEN UP", Align::kRight},
               {"SEQUENCES", Align::kRight},
               {"LOST", Align::kRight}});
  for (const v1::CacheInfo& cache : topology.caches()) {
    const v1::CacheSpec& spec = cache.spec();
    const std::string lost = Count(cache.sequences_lost());
    table.AddRow(
        {cache.cache_id(), DTypeName(spec.kv_dtype()), absl::StrCat(spec.layers()),
         absl::StrCat(spec.q_heads(), "/", spec.kv_heads()), HeadDims(spec),
         absl::StrCat(spec.page_size()), absl::StrCat(spec.interleave()),
         Count(cache.pages_total()), Count(cache.pages_used()),
         Percent(static_cast<double>(cache.pages_used()), static_cast<double>(cache.pages_total())),
         Count(cache.pages_shared()), WindowPages(cache), Count(cache.pages_given_up()),
         Count(cache.sequences()), cache.sequences_lost() > 0 ? style.Red(lost) : lost});
  }
  return table.Render(style);
}

std::string Sequences(const v1::CacheInfo& cache, const Style& style) {
  const int ranks = cache.sequence(0).local_lengths_size();
  std::vector<Table::Column> columns = {{"SEQUENCE", Align::kRight},
                                        {"TOKENS", Align::kRight},
                                        {"HELD FROM", Align::kRight},
                                        {"PAGES", Align::kRight}};
  for (int rank = 0; rank < ranks; ++rank) {
    columns.push_back({absl::StrCat("RANK ", rank), Align::kRight});
  }
  columns.push_back({""});
  Table table(columns);
  for (const v1::SequenceInfo& sequence : cache.sequence()) {
    std::vector<std::string> cells = {absl::StrCat(sequence.sequence_id()),
                                      Count(sequence.length()), Count(sequence.held_from()),
                                      Count(sequence.pages())};
    for (int rank = 0; rank < ranks; ++rank) {
      cells.push_back(rank < sequence.local_lengths_size() ? Count(sequence.local_lengths(rank))
                                                           : "");
    }
    cells.push_back(sequence.lost() ? style.Red("lost") : "");
    table.AddRow(std::move(cells));
  }
  std::string out = absl::StrCat("\n", style.Bold(cache.cache_id()), "\n", table.Render(style));
  if (cache.sequence_size() < cache.sequences()) {
    absl::StrAppend(
        &out,
        style.Dim(absl::StrCat("... and ", Count(cache.sequences() - cache.sequence_size()),
                               " more; see --max_sequences")),
        "\n");
  }
  return out;
}

// Of `stat --watch`.
constexpr char kRatesFormat[] = "%9s %10s %9s %10s %9s %9s %9s %9s %9s %9s %9s\n";

}  // namespace

std::string TopologyReport(const v1::GetTopologyReply& topology, const Style& style) {
  std::string out = GroupLine(topology, style);
  if (!topology.exchange().empty()) absl::StrAppend(&out, topology.exchange(), "\n");
  if (topology.workers_size() > 0) absl::StrAppend(&out, "\n", Workers(topology, style));
  if (topology.caches_size() == 0) return absl::StrCat(out, "\n", style.Dim("no caches"), "\n");
  absl::StrAppend(&out, "\n", Caches(topology, style));
  const std::string sessions = SessionsReport(topology, nullptr, 0, style);
  if (!sessions.empty()) absl::StrAppend(&out, "\n", sessions);
  for (const v1::CacheInfo& cache : topology.caches()) {
    if (cache.sequence_size() > 0) absl::StrAppend(&out, Sequences(cache, style));
  }
  return out;
}

std::string StatisticsReport(const v1::GetTopologyReply& topology, const Style& style) {
  const v1::Statistics& s = topology.statistics();
  int64_t given_up = 0;
  for (const v1::CacheInfo& cache : topology.caches()) given_up += cache.pages_given_up();
  Table totals({{"TOTAL"}, {"", Align::kRight}, {""}});
  const auto add = [&](const char* what, uint64_t value, const std::string& note = "") {
    totals.AddRow({what, Count(static_cast<int64_t>(value)), style.Dim(note)});
  };
  const std::string per_step =
      s.steps() == 0 ? ""
                     : absl::StrFormat("%.2f a step", static_cast<double>(s.requests()) /
                                                          static_cast<double>(s.steps()));
  totals.AddRow({"uptime", Seconds(s.uptime_seconds()), ""});
  add("requests", s.requests(), per_step);
  add("requests failed", s.requests_failed());
  add("replays", s.replays(), "answered again, not computed anew");
  add("query rows", s.query_rows());
  add("tokens appended", s.tokens_appended());
  add("steps", s.steps());
  add("steps aborted", s.steps_aborted());
  add("group formations", s.group_formations());
  add("pages given up", static_cast<uint64_t>(given_up), "no window reached them any more");

  Table times({{"TIME"}, {"PER STEP", Align::kRight}, {"TOTAL", Align::kRight}});
  const auto time = [&](const char* what, double seconds) {
    times.AddRow({what, MeanSeconds(seconds, static_cast<double>(s.steps())), Seconds(seconds)});
  };
  time("plan", s.plan_seconds());
  time("append", s.append_seconds());
  time("attend", s.attend_seconds());
  time("exchange", s.exchange_seconds());
  times.AddRow({"queue (per request)",
                MeanSeconds(s.queue_seconds(), static_cast<double>(s.requests())),
                Seconds(s.queue_seconds())});
  return absl::StrCat(totals.Render(style), "\n", times.Render(style));
}

std::string RatesTitle(const Style& style) {
  return style.Bold(absl::StrFormat(kRatesFormat, "steps/s", "requests/s", "failed/s", "rows/s",
                                    "tokens/s", "aborted/s", "plan", "append", "attend", "exchange",
                                    "queue"));
}

std::string RatesLine(const v1::Statistics& before, const v1::Statistics& after, double seconds) {
  const Interval interval(before, after, seconds);
  using S = v1::Statistics;
  return absl::StrFormat(kRatesFormat, interval.PerSecond([](const S& s) { return s.steps(); }),
                         interval.PerSecond([](const S& s) { return s.requests(); }),
                         interval.PerSecond([](const S& s) { return s.requests_failed(); }),
                         interval.PerSecond([](const S& s) { return s.query_rows(); }),
                         interval.PerSecond([](const S& s) { return s.tokens_appended(); }),
                         interval.PerSecond([](const S& s) { return s.steps_aborted(); }),
                         interval.MeanOverSteps([](const S& s) { return s.plan_seconds(); }),
                         interval.MeanOverSteps([](const S& s) { return s.append_seconds(); }),
                         interval.MeanOverSteps([](const S& s) { return s.attend_seconds(); }),
                         interval.MeanOverSteps([](const S& s) { return s.exchange_seconds(); }),
                         interval.MeanQueue());
}

std::string FlightReport(const v1::FlightRecord& record, const Style& style) {
  if (record.steps().empty()) return absl::StrCat(style.Dim("no steps yet"), "\n");
  Table table({{"STEP", Align::kRight},
               {"EPOCH", Align::kRight},
               {"STATE"},
               {"KIND"},
               {"LAYER", Align::kRight},
               {"CALLS", Align::kRight},
               {"ROWS", Align::kRight},
               {"TOKENS", Align::kRight},
               {"AGE", Align::kRight},
               {"QUEUE", Align::kRight},
               {"BUILD", Align::kRight},
               {"WORKERS", Align::kRight},
               {"PLAN", Align::kRight},
               {"APPEND", Align::kRight},
               {"ATTEND", Align::kRight},
               {"EXCHANGE", Align::kRight},
               {"REPLY", Align::kRight}});
  for (const v1::StepFlight& step : record.steps()) {
    v1::StepFlight::Rank slowest;
    for (const v1::StepFlight::Rank& rank : step.ranks()) {
      slowest.set_plan_seconds(std::max(slowest.plan_seconds(), rank.plan_seconds()));
      slowest.set_append_seconds(std::max(slowest.append_seconds(), rank.append_seconds()));
      slowest.set_attend_seconds(std::max(slowest.attend_seconds(), rank.attend_seconds()));
      slowest.set_exchange_seconds(std::max(slowest.exchange_seconds(), rank.exchange_seconds()));
    }
    const bool done = step.state() == v1::StepFlight::DONE;
    const std::string state = absl::AsciiStrToLower(v1::StepFlight::State_Name(step.state()));
    const auto phase = [&](double seconds) { return done ? Seconds(seconds) : std::string("-"); };
    table.AddRow({absl::StrCat(step.number()), absl::StrCat(step.epoch()),
                  done                                        ? state
                  : step.state() == v1::StepFlight::IN_FLIGHT ? style.Yellow(state)
                                                              : style.Red(state),
                  absl::AsciiStrToLower(v1::StepFlight::Kind_Name(step.kind())),
                  absl::StrCat(step.layer()), Count(step.calls()), Count(step.query_rows()),
                  Count(step.new_tokens()), Seconds(step.age_seconds()),
                  Seconds(step.queue_seconds()), Seconds(step.build_seconds()),
                  Seconds(step.workers_seconds()), phase(slowest.plan_seconds()),
                  phase(slowest.append_seconds()), phase(slowest.attend_seconds()),
                  phase(slowest.exchange_seconds()), phase(step.reply_seconds())});
  }
  return table.Render(style);
}

}  // namespace tributary::cli
