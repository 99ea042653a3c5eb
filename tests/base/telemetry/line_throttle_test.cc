#include "base/telemetry/line_throttle.h"

#include <gtest/gtest.h>

namespace tributary::telemetry {
namespace {

TEST(LineThrottleTest, WritesSoManyASecondAndCountsTheRest) {
  LineThrottle throttle(2);
  const auto start = LineThrottle::Clock::now();
  int64_t skipped = -1;
  EXPECT_TRUE(throttle.Admit(start, &skipped));
  EXPECT_EQ(skipped, 0);
  EXPECT_TRUE(throttle.Admit(start, &skipped));
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(throttle.Admit(start + std::chrono::milliseconds(i), &skipped));
  }
  EXPECT_TRUE(throttle.Admit(start + std::chrono::seconds(1), &skipped));
  EXPECT_EQ(skipped, 1000);
  EXPECT_TRUE(throttle.Admit(start + std::chrono::seconds(1), &skipped));
  EXPECT_EQ(skipped, 0);
}

}  // namespace
}  // namespace tributary::telemetry
