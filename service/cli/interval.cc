#include "service/cli/interval.h"

#include <cstdint>
#include <vector>

#include "base/telemetry/histogram.h"

namespace tributary::cli {

std::string MeanSeconds(double sum, double count) { return count > 0 ? Seconds(sum / count) : "-"; }

std::vector<std::string> Interval::PhaseMeans() const {
  using S = v1::Statistics;
  return {MeanQueue(), MeanOverSteps([](const S& s) { return s.plan_seconds(); }),
          MeanOverSteps([](const S& s) { return s.append_seconds(); }),
          MeanOverSteps([](const S& s) { return s.attend_seconds(); }),
          MeanOverSteps([](const S& s) { return s.exchange_seconds(); })};
}

std::vector<Table::Column> PhaseColumns(std::vector<Table::Column> first) {
  for (const char* phase : {"QUEUE", "PLAN", "APPEND", "ATTEND", "EXCHANGE"}) {
    first.push_back({phase, Align::kRight});
  }
  return first;
}

std::string Interval::Latency(double quantile) const {
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

}  // namespace tributary::cli
