#include "service/cli/top_report.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cli/group_report.h"
#include "service/cli/interval.h"
#include "service/cli/session_report.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

constexpr int kBarWidth = 20;

std::string Rates(const Interval& interval, const v1::Statistics& now, const Style& style) {
  const auto steps = [](const v1::Statistics& s) { return s.steps(); };
  const auto calls = [](const v1::Statistics& s) { return s.requests(); };
  const auto failed = [](const v1::Statistics& s) { return s.requests_failed(); };
  const auto rows = [](const v1::Statistics& s) { return s.query_rows(); };
  const auto tokens = [](const v1::Statistics& s) { return s.tokens_appended(); };
  const auto aborted = [](const v1::Statistics& s) { return s.steps_aborted(); };
  Table table({{"STEPS/S", Align::kRight},
               {"CALLS/S", Align::kRight},
               {"FAILED/S", Align::kRight},
               {"ROWS/S", Align::kRight},
               {"TOKENS/S", Align::kRight},
               {"OPEN", Align::kRight},
               {"P50", Align::kRight},
               {"P99", Align::kRight},
               {"SKEW", Align::kRight},
               {"ABORTED", Align::kRight},
               {"FORMATIONS", Align::kRight}});
  const std::string failures = interval.PerSecond(failed);
  const std::string aborts = Count(static_cast<int64_t>(now.steps_aborted()));
  table.AddRow({interval.PerSecond(steps), interval.PerSecond(calls),
                interval.Rise(failed) > 0 ? style.Red(failures) : failures,
                interval.PerSecond(rows), interval.PerSecond(tokens),
                Count(static_cast<int64_t>(now.calls_open())), interval.Latency(0.5),
                interval.Latency(0.99),
                interval.MeanOverSteps([](const v1::Statistics& s) { return s.skew_seconds(); }),
                interval.Rise(aborted) > 0 ? style.Red(aborts) : aborts,
                Count(static_cast<int64_t>(now.group_formations()))});
  return table.Render(style);
}

std::string Phases(const Interval& interval, const Style& style) {
  Table table(PhaseColumns({{"STEP:"}}));
  std::vector<std::string> cells = interval.PhaseMeans();
  cells.insert(cells.begin(), "mean");
  table.AddRow(std::move(cells));
  return table.Render(style);
}

std::string Workers(const v1::GetTopologyReply& before, const v1::GetTopologyReply& after,
                    const Interval& interval, double seconds, const Style& style) {
  std::vector<Table::Column> columns = WorkerColumns(after);
  columns.push_back({"SLOWEST", Align::kRight});
  Table table(std::move(columns));
  for (int i = 0; i < after.workers_size(); ++i) {
    const v1::WorkerInfo& worker = after.workers(i);
    const double was = i < before.workers_size() ? before.workers(i).busy_seconds() : 0;
    // Remote workers say how busy they were once per heartbeat, so that a short interval may see
    // more than itself.
    const double busy = std::min(seconds, Since(was, worker.busy_seconds()));
    const double slowest = interval.Rise([i](const v1::Statistics& s) {
      return i < s.slowest_steps_size() ? s.slowest_steps(i) : uint64_t{0};
    });
    std::vector<std::string> cells = WorkerCells(after, worker, Percent(busy, seconds), style);
    cells.push_back(Percent(slowest, interval.steps()));
    table.AddRow(std::move(cells));
  }
  return table.Render(style);
}

std::string Bar(double share, const Style& style) {
  const int filled = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * kBarWidth));
  const std::string bar =
      absl::StrCat("[", std::string(filled, '#'), std::string(kBarWidth - filled, ' '), "]");
  return share > 0.9 ? style.Red(bar) : share > 0.75 ? style.Yellow(bar) : bar;
}

// Whether every page has the replica that it should have.
std::string Replicas(const v1::CacheInfo& cache, const Style& style) {
  if (cache.pages_restoring() > 0) {
    return style.Red(absl::StrCat("restoring, ", Count(cache.pages_restoring()), " pages left"));
  }
  if (cache.pages_without_replica() > 0) {
    return style.Yellow(
        absl::StrCat("copying, ", Count(cache.pages_without_replica()), " pages left"));
  }
  return cache.spec().replicas() > 0 ? "whole" : "none";
}

std::string CacheUse(const v1::GetTopologyReply& now, const Style& style) {
  if (now.caches().empty()) return absl::StrCat(style.Dim("no caches"), "\n");
  Table table({{"CACHE"},
               {"PAGES", Align::kRight},
               {"USED", Align::kRight},
               {"", Align::kRight},
               {""},
               {"SHARED", Align::kRight},
               {"SEQUENCES", Align::kRight},
               {"LOST", Align::kRight},
               {"REPLICAS", Align::kLeft}});
  for (const v1::CacheInfo& cache : now.caches()) {
    const auto used = static_cast<double>(cache.pages_used());
    const auto total = static_cast<double>(std::max<int64_t>(cache.pages_total(), 1));
    const std::string lost = Count(cache.sequences_lost());
    table.AddRow({cache.cache_id(), Count(cache.pages_total()), Count(cache.pages_used()),
                  Percent(used, total), Bar(used / total, style), Count(cache.pages_shared()),
                  Count(cache.sequences()), cache.sequences_lost() > 0 ? style.Red(lost) : lost,
                  Replicas(cache, style)});
  }
  return table.Render(style);
}

}  // namespace

std::string TopReport(const v1::GetTopologyReply& before, const v1::GetTopologyReply& after,
                      double seconds, const Style& style) {
  const Interval interval(before.statistics(), after.statistics(), seconds);
  const std::string up = absl::StrCat("  up ", Seconds(after.statistics().uptime_seconds()));
  const std::string sessions = SessionsReport(after, &before, seconds, style);
  return absl::StrCat(GroupLine(after, style, up), "\n", Rates(interval, after.statistics(), style),
                      "\n", Phases(interval, style), "\n",
                      Workers(before, after, interval, seconds, style), "\n",
                      CacheUse(after, style), sessions.empty() ? "" : "\n", sessions);
}

}  // namespace tributary::cli
