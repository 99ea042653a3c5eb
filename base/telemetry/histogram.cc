#include "base/telemetry/histogram.h"

#include <algorithm>

namespace tributary::telemetry {
namespace {

constexpr double kLatencyBounds[] = {10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3,
                                     2e-3,  5e-3,  10e-3, 20e-3,  50e-3,  0.1,    0.2,
                                     0.5,   1,     2,     5,      10,     20,     50};
constexpr double kCountBounds[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

}  // namespace

std::span<const double> LatencyBounds() { return kLatencyBounds; }
std::span<const double> CountBounds() { return kCountBounds; }

Histogram::Histogram(std::span<const double> bounds)
    : bounds_(bounds), counts_(std::make_unique<std::atomic<uint64_t>[]>(bounds.size() + 1)) {}

void Histogram::Observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[bucket].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

HistogramValues Histogram::Read() const {
  HistogramValues values;
  for (size_t i = 0; i <= bounds_.size(); ++i) {
    values.counts.push_back(counts_[i].load(std::memory_order_relaxed));
    values.count += values.counts.back();
  }
  values.sum = sum_.load(std::memory_order_relaxed);
  return values;
}

double Quantile(std::span<const double> bounds, std::span<const uint64_t> counts, double quantile) {
  uint64_t total = 0;
  for (const uint64_t count : counts) total += count;
  if (total == 0) return 0;
  const double wanted = quantile * static_cast<double>(total);
  double below = 0;
  for (size_t i = 0; i < bounds.size() && i < counts.size(); ++i) {
    const double here = static_cast<double>(counts[i]);
    if (here > 0 && below + here >= wanted) {
      const double low = i == 0 ? 0 : bounds[i - 1];
      return low + (bounds[i] - low) * (wanted - below) / here;
    }
    below += here;
  }
  return bounds.back();
}

}  // namespace tributary::telemetry
