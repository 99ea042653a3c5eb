// Whether something grows: a slope that a few odd samples cannot change.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tributary::test {

struct Sample {
  double x = 0;
  double y = 0;
};

// The median of the slopes between all pairs of samples (Theil 1950, Sen 1968): up to 29% of the
// samples may be arbitrary. 0 when no two differ in x.
inline double TheilSenSlope(const std::vector<Sample>& samples) {
  std::vector<double> slopes;
  for (size_t i = 0; i < samples.size(); ++i) {
    for (size_t j = i + 1; j < samples.size(); ++j) {
      const double run = samples[j].x - samples[i].x;
      if (run != 0) slopes.push_back((samples[j].y - samples[i].y) / run);
    }
  }
  if (slopes.empty()) return 0;
  const auto middle = slopes.begin() + static_cast<std::ptrdiff_t>(slopes.size() / 2);
  std::nth_element(slopes.begin(), middle, slopes.end());
  if (slopes.size() % 2 == 1) return *middle;
  return (*std::max_element(slopes.begin(), middle) + *middle) / 2;
}

}  // namespace tributary::test
