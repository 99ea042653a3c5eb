#include "base/telemetry/families.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>

namespace tributary::telemetry {
namespace {

std::vector<prometheus::ClientMetric::Label> ToLabels(const Labels& labels) {
  std::vector<prometheus::ClientMetric::Label> out;
  for (const auto& [name, value] : labels) out.push_back({name, value});
  return out;
}

int OpenFiles() {
  std::error_code error;
  int count = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return count;
}

// The fields of /proc/self/stat from the third on; the second is a name that may hold spaces.
std::vector<double> StatFields() {
  std::ifstream file("/proc/self/stat");
  std::stringstream text;
  text << file.rdbuf();
  const std::string line = text.str();
  const size_t name_end = line.rfind(')');
  std::vector<double> fields;
  if (name_end == std::string::npos) return fields;
  std::istringstream rest(line.substr(name_end + 1));
  std::string state;
  rest >> state;
  fields.push_back(0);
  for (double value = 0; rest >> value;) fields.push_back(value);
  return fields;
}

class Process final : public prometheus::Collectable {
 public:
  Process(std::string version, std::string component)
      : version_(std::move(version)), component_(std::move(component)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    Families out;
    out.Gauge({"tributary_build_info", "Always 1; which program of which version."});
    out.Add(1, {{"version", version_}, {"component", component_}});
    // Positions in proc(5), from the third field.
    constexpr size_t kUserTime = 11, kSystemTime = 12, kThreads = 17, kVirtualBytes = 20,
                     kResidentPages = 21;
    const std::vector<double> fields = StatFields();
    if (fields.size() > kResidentPages) {
      const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
      out.Counter({"process_cpu_seconds_total", "CPU time spent, user and system."},
                  (fields[kUserTime] + fields[kSystemTime]) / ticks);
      out.Gauge({"process_resident_memory_bytes", "Memory in RAM."},
                fields[kResidentPages] * static_cast<double>(sysconf(_SC_PAGESIZE)));
      out.Gauge({"process_virtual_memory_bytes", "Memory mapped."}, fields[kVirtualBytes]);
      out.Gauge({"process_threads", "Threads."}, fields[kThreads]);
    }
    out.Gauge({"process_open_fds", "Open file descriptors."}, OpenFiles());
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    out.Gauge({"process_max_fds", "File descriptors that may be open."},
              static_cast<double>(limit.rlim_cur));
    out.Gauge({"process_start_time_seconds", "When the process began, since 1970."}, started_);
    return out.Take();
  }

 private:
  const std::string version_;
  const std::string component_;
  const double started_ =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
};

}  // namespace

void Families::Begin(const Metric& metric, prometheus::MetricType type) {
  prometheus::MetricFamily family;
  family.name = metric.name;
  family.help = metric.help;
  family.type = type;
  families_.push_back(std::move(family));
}

void Families::Add(double value, const Labels& labels) {
  prometheus::ClientMetric metric;
  metric.label = ToLabels(labels);
  metric.counter.value = value;  // the family's type says which of the two is looked at
  metric.gauge.value = value;
  families_.back().metric.push_back(std::move(metric));
}

void Families::Add(const telemetry::Histogram& histogram, const Labels& labels) {
  prometheus::ClientMetric metric;
  metric.label = ToLabels(labels);
  const HistogramValues values = histogram.Read();
  uint64_t cumulative = 0;
  for (size_t i = 0; i < values.counts.size(); ++i) {
    cumulative += values.counts[i];
    const double bound = i < histogram.bounds().size() ? histogram.bounds()[i]
                                                       : std::numeric_limits<double>::infinity();
    metric.histogram.bucket.push_back({cumulative, bound});
  }
  metric.histogram.sample_count = values.count;
  metric.histogram.sample_sum = values.sum;
  families_.back().metric.push_back(std::move(metric));
}

std::shared_ptr<prometheus::Collectable> ProcessMetrics(std::string version,
                                                        std::string component) {
  return std::make_shared<Process>(std::move(version), std::move(component));
}

}  // namespace tributary::telemetry
