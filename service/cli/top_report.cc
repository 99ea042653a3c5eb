#include "service/cli/top_report.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/telemetry/histogram.h"
#include "service/cli/table.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

constexpr int kBarWidth = 20;

// Totals of a service that was restarted in between begin at 0.
template <typename T>
T Since(T before, T after) {
  return after >= before ? after - before : after;
}

// What happened between two replies.
class Interval {
 public:
  Interval(const v1::Statistics& before, const v1::Statistics& after, double seconds)
      : before_(before), after_(after), seconds_(seconds) {}

  template <typename Get>
  double Rise(Get get) const {
    return static_cast<double>(Since(get(before_), get(after_)));
  }
  template <typename Get>
  std::string PerSecond(Get get) const {
    return Rate(seconds_ > 0 ? Rise(get) / seconds_ : 0);
  }
  template <typename Get>
  std::string MeanOverSteps(Get get) const {
    return Mean(Rise(get), steps());
  }
  double steps() const {
    return Rise([](const v1::Statistics& s) { return s.steps(); });
  }
  double requests() const {
    return Rise([](const v1::Statistics& s) { return s.requests(); });
  }
  static std::string Mean(double sum, double count) {
    return count > 0 ? Seconds(sum / count) : "-";
  }
  // Of the calls of the interval.
  std::string Latency(double quantile) const {
    std::vector<uint64_t> counts;
    uint64_t total = 0;
    for (int i = 0; i < after_.call_seconds_count_size(); ++i) {
      const uint64_t before =
          i < before_.call_seconds_count_size() ? before_.call_seconds_count(i) : 0;
      counts.push_back(Since(before, after_.call_seconds_count(i)));
      total += counts.back();
    }
    if (total == 0 || after_.call_seconds_bound().empty()) return "-";
    const std::vector<double> bounds(after_.call_seconds_bound().begin(),
                                     after_.call_seconds_bound().end());
    return Seconds(telemetry::Quantile(bounds, counts, quantile));
  }

 private:
  const v1::Statistics& before_;
  const v1::Statistics& after_;
  const double seconds_;
};

std::string Group(const v1::GetTopologyReply& now, const Style& style) {
  const bool ready = now.state() == v1::GROUP_STATE_READY;
  const auto connected = std::count_if(now.workers().begin(), now.workers().end(),
                                       [](const auto& worker) { return worker.connected(); });
  return absl::StrCat(ready ? style.Green("ready") : style.Yellow("forming"), "  epoch ",
                      now.epoch(), "  ", connected, " of ", now.workers_size(), " workers  up ",
                      Seconds(now.statistics().uptime_seconds()), "  version ", now.version(),
                      "\n");
}

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
  Table table({{"STEP:", Align::kLeft},
               {"QUEUE", Align::kRight},
               {"PLAN", Align::kRight},
               {"APPEND", Align::kRight},
               {"ATTEND", Align::kRight},
               {"EXCHANGE", Align::kRight}});
  table.AddRow(
      {"mean",
       Interval::Mean(interval.Rise([](const v1::Statistics& s) { return s.queue_seconds(); }),
                      interval.requests()),
       interval.MeanOverSteps([](const v1::Statistics& s) { return s.plan_seconds(); }),
       interval.MeanOverSteps([](const v1::Statistics& s) { return s.append_seconds(); }),
       interval.MeanOverSteps([](const v1::Statistics& s) { return s.attend_seconds(); }),
       interval.MeanOverSteps([](const v1::Statistics& s) { return s.exchange_seconds(); })});
  return table.Render(style);
}

std::string Workers(const v1::GetTopologyReply& before, const v1::GetTopologyReply& after,
                    const Interval& interval, double seconds, const Style& style) {
  Table table({{"RANK", Align::kRight},
               {"ADDRESS"},
               {"BACKEND"},
               {"STATE"},
               {"MEMORY", Align::kRight},
               {"TOKENS", Align::kRight},
               {"BUSY", Align::kRight},
               {"SLOWEST", Align::kRight}});
  for (int i = 0; i < after.workers_size(); ++i) {
    const v1::WorkerInfo& worker = after.workers(i);
    const double was = i < before.workers_size() ? before.workers(i).busy_seconds() : 0;
    // Remote workers say how busy they were once a heartbeat, so that a short interval may see more
    // than itself.
    const double busy = std::min(seconds, Since(was, worker.busy_seconds()));
    const double slowest = interval.Rise([i](const v1::Statistics& s) {
      return i < s.slowest_steps_size() ? s.slowest_steps(i) : uint64_t{0};
    });
    table.AddRow({absl::StrCat(worker.rank()), worker.address(), worker.backend(),
                  worker.connected() ? style.Green("connected") : style.Red("lost"),
                  Bytes(static_cast<double>(worker.memory_bytes())), Count(worker.tokens()),
                  Percent(busy, seconds), Percent(slowest, interval.steps())});
  }
  return table.Render(style);
}

std::string Bar(double share, const Style& style) {
  const int filled = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * kBarWidth));
  const std::string bar =
      absl::StrCat("[", std::string(filled, '#'), std::string(kBarWidth - filled, ' '), "]");
  return share > 0.9 ? style.Red(bar) : share > 0.75 ? style.Yellow(bar) : bar;
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
               {"LOST", Align::kRight}});
  for (const v1::CacheInfo& cache : now.caches()) {
    const auto used = static_cast<double>(cache.pages_used());
    const auto total = static_cast<double>(std::max<int64_t>(cache.pages_total(), 1));
    const std::string lost = Count(cache.sequences_lost());
    table.AddRow({cache.cache_id(), Count(cache.pages_total()), Count(cache.pages_used()),
                  Percent(used, total), Bar(used / total, style), Count(cache.pages_shared()),
                  Count(cache.sequences()), cache.sequences_lost() > 0 ? style.Red(lost) : lost});
  }
  return table.Render(style);
}

}  // namespace

std::string TopReport(const v1::GetTopologyReply& before, const v1::GetTopologyReply& after,
                      double seconds, const Style& style) {
  const Interval interval(before.statistics(), after.statistics(), seconds);
  return absl::StrCat(Group(after, style), "\n", Rates(interval, after.statistics(), style), "\n",
                      Phases(interval, style), "\n",
                      Workers(before, after, interval, seconds, style), "\n",
                      CacheUse(after, style));
}

}  // namespace tributary::cli
