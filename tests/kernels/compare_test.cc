// The comparison that other tests rely on fails when it should, and says where.
#include "tests/support/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tributary::test {
namespace {

using ::testing::HasSubstr;

TEST(CompareTest, AcceptsWhatIsWithinTolerance) {
  const std::vector<float> actual = {1.0f, 2.001f, std::nanf("")};
  const std::vector<double> expected = {1.0, 2.0, std::nan("")};
  EXPECT_TRUE(AllClose(actual, expected, {1e-3, 1e-3}, {3}));
}

TEST(CompareTest, NamesTheWorstElement) {
  const std::vector<float> actual = {1.0f, 2.5f, 3.1f, 4.0f};
  const std::vector<double> expected = {1.0, 2.0, 3.0, 4.0};
  const auto result = AllClose(actual, expected, {1e-3, 0}, {2, 2});
  EXPECT_FALSE(result);
  EXPECT_THAT(result.message(), HasSubstr("2 of 4"));
  EXPECT_THAT(result.message(), HasSubstr("[0, 1] got 2.5, expected 2"));
}

TEST(CompareTest, NansAndInfinitiesMustBeInTheirPlaces) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> numbers = {1.0, 2.0};
  for (const double odd : {std::nan(""), inf, -inf}) {
    const std::vector<double> special = {1.0, odd};
    EXPECT_FALSE(AllClose(special, numbers, {inf, 0}, {2})) << odd;
    EXPECT_FALSE(AllClose(numbers, special, {inf, 0}, {2})) << odd;
    EXPECT_TRUE(AllClose(special, special, {0, 0}, {2})) << odd;
  }
  EXPECT_FALSE(AllClose(std::vector{inf}, std::vector{-inf}, {inf, 0}, {1}));
}

TEST(CompareTest, SizesMustBeEqual) {
  EXPECT_FALSE(AllClose(std::vector<float>(3), std::vector<double>(2), {1, 1}, {3}));
}

}  // namespace
}  // namespace tributary::test
