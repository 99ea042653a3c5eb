// Compares results with the float64 reference: first where NaN and infinities are, then the error,
// then, on failure, says how many elements are wrong and where and what the worst one is.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace tributary::test {

// An element passes when |actual - expected| <= absolute + relative * |expected|.
struct Tolerance {
  double absolute = 0;
  double relative = 0;
};

// Half the distance from 1 to the next number: what one rounding costs, relatively.
inline double RoundingError(DType type) {
  switch (type) {
    case DType::kF32:
      return 0x1p-24;
    case DType::kBf16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    case DType::kFp8E4M3:
      return 0x1p-4;
    case DType::kFp8E5M2:
      return 0x1p-3;
    case DType::kNvfp4:
      return 0x1p-2;
  }
  return 0;
}

// For attention computed in float over the very same (quantised) cache as the reference, with
// values of size about 1: what is left is the rounding of float sums and of exponentials, and the
// 2^-17 of a weight cut into two bf16 pieces. It does not depend on the cache's type.
inline constexpr Tolerance kAttentionTolerance{2e-5, 2e-5};

// For results that were rounded once to `type`.
inline Tolerance RoundedTo(DType type, Tolerance base = kAttentionTolerance) {
  return {base.absolute + RoundingError(type), base.relative + RoundingError(type)};
}

// For the output of attention with queries of a type. A host that computes in bf16 gets weights of
// bf16 (kernels/cpu/bf16_pieces.h), each off by RoundingError of itself at most, and so its output
// is off by that share of the weighted mean of |v|: of 4 where values cancel and of the output
// itself where they do not, for values of a normal distribution. Every other type gets weights as
// good as float, and an LSE never depends on the type: kAttentionTolerance holds it.
inline Tolerance AttentionTolerance(DType q_dtype) {
  if (q_dtype != DType::kBf16) return kAttentionTolerance;
  const double rounding = RoundingError(DType::kBf16);
  return {kAttentionTolerance.absolute + 4 * rounding, kAttentionTolerance.relative + rounding};
}

// The position of element `index` of a tensor as "[1, 0, 17]".
inline std::string Position(size_t index, std::span<const int64_t> shape) {
  std::string text;
  for (size_t i = shape.size(); i-- > 0;) {
    const size_t extent = std::max<int64_t>(1, shape[i]);
    text = std::to_string(i == 0 ? index : index % extent) + (text.empty() ? "" : ", ") + text;
    index /= extent;
  }
  return "[" + text + "]";
}

// `shape` is of both tensors and only used to name positions.
template <typename Actual, typename Expected>
::testing::AssertionResult AllClose(const Actual& actual_range, const Expected& expected_range,
                                    Tolerance tolerance, const std::vector<int64_t>& shape) {
  const auto actual = std::span(actual_range);
  const auto expected = std::span(expected_range);
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure()
           << actual.size() << " elements where " << expected.size() << " are expected";
  }
  const auto kind = [](double x) {
    return std::isnan(x) ? 1 : std::isinf(x) ? (x > 0 ? 2 : 3) : 0;
  };
  const auto complain = [&](const char* what, size_t count, size_t worst) {
    std::ostringstream text;
    text.precision(9);
    text << count << " of " << actual.size() << " elements " << what << "; at "
         << Position(worst, shape) << " got " << static_cast<double>(actual[worst]) << ", expected "
         << static_cast<double>(expected[worst]);
    return ::testing::AssertionFailure() << text.str();
  };

  size_t misplaced = 0, first_misplaced = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (kind(actual[i]) == kind(expected[i])) continue;
    if (misplaced++ == 0) first_misplaced = i;
  }
  if (misplaced != 0) return complain("have NaN or Inf misplaced", misplaced, first_misplaced);

  size_t wrong = 0, worst = 0;
  double worst_excess = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (kind(expected[i]) != 0) continue;
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    const double excess = error - tolerance.absolute -
                          tolerance.relative * std::abs(static_cast<double>(expected[i]));
    if (excess <= 0) continue;
    ++wrong;
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (wrong != 0) return complain("are too far off", wrong, worst);
  return ::testing::AssertionSuccess();
}

// Root mean square of the difference, for statements about accuracy as a whole.
template <typename Actual, typename Expected>
double RmsError(const Actual& actual, const Expected& expected) {
  double sum = 0;
  for (size_t i = 0; i < std::size(expected); ++i) {
    const double error = static_cast<double>(actual[i]) - expected[i];
    sum += error * error;
  }
  return std::sqrt(sum / std::max<size_t>(1, std::size(expected)));
}

}  // namespace tributary::test
