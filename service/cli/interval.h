// What happened in a service between two replies that hold its totals.
#pragma once

#include <string>
#include <vector>

#include "service/cli/table.h"
#include "service/cli/units.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::cli {

// Totals of a service that was restarted in between begin at 0.
template <typename T>
T Since(T before, T after) {
  return after >= before ? after - before : after;
}

// "1.25 ms", or "-" of nothing.
std::string MeanSeconds(double sum, double count);

class Interval {
 public:
  // Both outlive it. `seconds` lie between them.
  Interval(const v1::Statistics& before, const v1::Statistics& after, double seconds)
      : before_(before), after_(after), seconds_(seconds) {}

  // By how much a total rose. `get` takes the total out of the statistics.
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
    return MeanSeconds(Rise(get), steps());
  }
  double steps() const {
    return Rise([](const v1::Statistics& s) { return s.steps(); });
  }
  // How long the calls of the interval waited for their step, on average.
  std::string MeanQueue() const {
    return MeanSeconds(Rise([](const v1::Statistics& s) { return s.queue_seconds(); }),
                       Rise([](const v1::Statistics& s) { return s.requests(); }));
  }
  // What a step took of each phase, on average, in the order of PhaseColumns.
  std::vector<std::string> PhaseMeans() const;
  // Of the calls of the interval.
  std::string Latency(double quantile) const;

 private:
  const v1::Statistics& before_;
  const v1::Statistics& after_;
  const double seconds_;
};

// `first`, and behind it the columns of a step's phases: queue, plan, append, attend, exchange.
std::vector<Table::Column> PhaseColumns(std::vector<Table::Column> first);

}  // namespace tributary::cli
