#include "base/telemetry/histogram.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace tributary::telemetry {
namespace {

TEST(HistogramTest, BoundsAreInclusive) {
  constexpr double kBounds[] = {1, 2};
  Histogram histogram(kBounds);
  for (const double value : {0.5, 1.0, 1.5, 2.0, 2.5, 100.0}) histogram.Observe(value);
  const HistogramValues values = histogram.Read();
  EXPECT_EQ(values.counts, (std::vector<uint64_t>{2, 2, 2}));
  EXPECT_EQ(values.count, 6);
  EXPECT_DOUBLE_EQ(values.sum, 107.5);
}

TEST(HistogramTest, NothingIsLostBetweenThreads) {
  Histogram histogram(LatencyBounds());
  Counter counter;
  constexpr int kThreads = 4, kEach = 10'000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        histogram.Observe(1e-3);
        counter.Add(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.Read().count, kThreads * kEach);
  EXPECT_NEAR(histogram.Read().sum, kThreads * kEach * 1e-3, 1e-6);
  EXPECT_EQ(counter.value(), 2 * kThreads * kEach);
}

TEST(HistogramTest, QuantilesLieInTheRightBucket) {
  constexpr double kBounds[] = {1, 2, 4};
  const auto at = [&](std::vector<uint64_t> counts, double q) {
    return Quantile(kBounds, counts, q);
  };
  EXPECT_EQ(at({0, 0, 0, 0}, 0.5), 0);
  EXPECT_DOUBLE_EQ(at({10, 0, 0, 0}, 0.5), 0.5);
  EXPECT_DOUBLE_EQ(at({5, 5, 0, 0}, 0.5), 1);
  EXPECT_DOUBLE_EQ(at({0, 0, 10, 0}, 0.5), 3);
  EXPECT_DOUBLE_EQ(at({98, 0, 2, 0}, 0.99), 3);
  EXPECT_DOUBLE_EQ(at({0, 0, 0, 7}, 0.5), 4) << "beyond the bounds there is no more to say";
}

TEST(HistogramTest, BoundsRise) {
  for (const auto bounds : {LatencyBounds(), CountBounds()}) {
    for (size_t i = 1; i < bounds.size(); ++i) EXPECT_GT(bounds[i], bounds[i - 1]);
  }
}

}  // namespace
}  // namespace tributary::telemetry
