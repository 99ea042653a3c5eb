// Counters for the path of a step: written by any thread without a lock, read by whoever asks.
//
// A reader may see an observation in a bucket and not yet in the sum: good enough for rates.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tributary::telemetry {

class Counter {
 public:
  void Add(uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_ = 0;
};

// Seconds, from 10 us to 50 s in steps of 1, 2, 5.
std::span<const double> LatencyBounds();
// Small whole numbers: 1, 2, 4, ... 4096.
std::span<const double> CountBounds();

struct HistogramValues {
  std::vector<uint64_t>
      counts;  // one per bound, and one for what lies above the last; not cumulative
  double sum = 0;
  uint64_t count = 0;
};

class Histogram {
 public:
  // Upper bounds, inclusive, ascending; they outlive the histogram.
  explicit Histogram(std::span<const double> bounds);

  void Observe(double value);
  std::span<const double> bounds() const { return bounds_; }
  HistogramValues Read() const;

 private:
  const std::span<const double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;  // [bounds + 1]
  std::atomic<double> sum_ = 0;
};

// The value below which a share `quantile` of the observations lies, taking those of a bucket as
// evenly spread. `counts` as in HistogramValues. The last bound when it lies above; 0 without any.
double Quantile(std::span<const double> bounds, std::span<const uint64_t> counts, double quantile);

}  // namespace tributary::telemetry
