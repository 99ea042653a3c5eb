// What a /metrics page says.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

namespace tributary::test {

struct MetricFamily {
  std::string type;              // "counter", "gauge", "histogram", "summary"
  std::set<std::string> labels;  // names; without `le` and `quantile`
  bool operator==(const MetricFamily&) const = default;
};

struct Page {
  std::map<std::string, MetricFamily> families;  // by name
  std::map<std::string, double> samples;         // "name{label=\"value\"}", as printed
};

Page ParsePage(const std::string& text);

// The families that docs/metrics.md lists below headings of these names.
std::map<std::string, MetricFamily> DocumentedMetrics(const std::vector<std::string>& headings);

// The port in "... metrics_port=9464 ..." or "serving metrics port=9464"; 0 when the log has none.
int MetricsPort(const std::string& log);

}  // namespace tributary::test
