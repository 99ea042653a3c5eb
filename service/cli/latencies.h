// Durations and their percentiles, exact: every sample is kept.
#pragma once

#include <cstddef>
#include <vector>

namespace tributary::cli {

class Latencies {
 public:
  void Add(double seconds) { samples_.push_back(static_cast<float>(seconds)); }
  void Merge(const Latencies& other);
  size_t count() const { return samples_.size(); }

  // The least sample that is not exceeded by `fraction` (in (0, 1]) of all; 0 without samples.
  double Percentile(double fraction);
  double Mean() const;

 private:
  std::vector<float> samples_;
  size_t sorted_ = 0;  // samples in order at the front
};

}  // namespace tributary::cli
