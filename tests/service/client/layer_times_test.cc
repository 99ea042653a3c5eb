// Where the time of a layer went, from the stamps of two GPUs.
#include <gtest/gtest.h>

#include "service/client/layer_stamps.h"

namespace tributary::client {
namespace {

TEST(LayerTimes, AreTheSpansBetweenStamps) {
  const LayerTimes times =
      TimesOf({.begun = 1'000, .rung = 3'000, .service = {4'000, 9'000, 11'000}, .back = 11'500},
              /*one_clock=*/true);
  EXPECT_DOUBLE_EQ(times.fill, 2e-6);
  EXPECT_DOUBLE_EQ(times.ring_seen, 1e-6);
  EXPECT_DOUBLE_EQ(times.attention, 5e-6);
  EXPECT_DOUBLE_EQ(times.exchange, 2e-6);
  EXPECT_DOUBLE_EQ(times.ring_back, 0.5e-6);
  EXPECT_DOUBLE_EQ(times.wait, 8.5e-6);
}

TEST(LayerTimes, WithOneRankAllIsAttention) {
  const LayerTimes times =
      TimesOf({.begun = 1'000, .rung = 3'000, .service = {4'000, 0, 11'000}, .back = 11'500},
              /*one_clock=*/true);
  EXPECT_DOUBLE_EQ(times.attention, 7e-6);
  EXPECT_DOUBLE_EQ(times.exchange, 0);
}

// By its own clock the service's GPU had seen the layer long before the host's rang.
TEST(LayerTimes, OfTwoClocksTheSumIsKnown) {
  const LayerTimes times =
      TimesOf({.begun = 101'000, .rung = 103'000, .service = {4'000, 0, 11'000}, .back = 111'500},
              /*one_clock=*/false);
  EXPECT_NEAR(times.attention, 7e-6, 1e-12);
  EXPECT_NEAR(times.wait, 8.5e-6, 1e-12);
  EXPECT_NEAR(times.ring_seen, 0.75e-6, 1e-12);
  EXPECT_NEAR(times.ring_back, 0.75e-6, 1e-12);
}

}  // namespace
}  // namespace tributary::client
