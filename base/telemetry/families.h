// Values as Prometheus metric families. What is exported is listed in docs/metrics.md, which a test
// compares with a scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/telemetry/histogram.h"

namespace tributary::telemetry {

// Name and help of a family. Names as Prometheus wants them: base units, `_total` for counters.
struct Metric {
  const char* name;
  const char* help;
};

using Labels = std::vector<std::pair<const char*, std::string>>;

// Families one after the other; what is added belongs to the one begun last.
class Families {
 public:
  void Counter(const Metric& metric) { Begin(metric, prometheus::MetricType::Counter); }
  void Gauge(const Metric& metric) { Begin(metric, prometheus::MetricType::Gauge); }
  void Histogram(const Metric& metric) { Begin(metric, prometheus::MetricType::Histogram); }
  void Add(double value, const Labels& labels = {});
  void Add(const telemetry::Histogram& histogram, const Labels& labels = {});
  // Families of one value.
  void Counter(const Metric& metric, double value) { Counter(metric), Add(value); }
  void Gauge(const Metric& metric, double value) { Gauge(metric), Add(value); }

  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  void Begin(const Metric& metric, prometheus::MetricType type);

  std::vector<prometheus::MetricFamily> families_;
};

// process_cpu_seconds_total, process_resident_memory_bytes, process_open_fds and the like, from
// /proc; and tributary_build_info.
std::shared_ptr<prometheus::Collectable> ProcessMetrics(std::string version, std::string component);

}  // namespace tributary::telemetry
