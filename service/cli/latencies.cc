#include "service/cli/latencies.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tributary::cli {

void Latencies::Merge(const Latencies& other) {
  samples_.insert(samples_.end(), other.samples_.begin(), other.samples_.end());
  sorted_ = 0;
}

double Latencies::Percentile(double fraction) {
  if (samples_.empty()) return 0;
  if (sorted_ != samples_.size()) {
    std::sort(samples_.begin(), samples_.end());
    sorted_ = samples_.size();
  }
  const double rank = std::ceil(fraction * static_cast<double>(samples_.size()));
  const auto index = static_cast<size_t>(std::max(1.0, rank)) - 1;
  return samples_[std::min(index, samples_.size() - 1)];
}

double Latencies::Mean() const {
  if (samples_.empty()) return 0;
  return std::accumulate(samples_.begin(), samples_.end(), 0.0) /
         static_cast<double>(samples_.size());
}

}  // namespace tributary::cli
