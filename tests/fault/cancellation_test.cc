// Clients that cancel, run out of time or hang up in the middle of calls, many times over, beside
// hosts that do not: the group never breaks, the hosts' answers stay right, and when the clients
// are gone nothing of theirs is left. soak.cc does the same for longer and looks at memory closely.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "tests/fault/cancellation_rig.h"
#include "tests/support/trend.h"
#include "tests/support/usage.h"

namespace tributary::test {
namespace {

constexpr std::chrono::seconds kPatience{60};
constexpr int kRanks = 2;
constexpr int kClients = 8;
constexpr int kInjections = 1000;
constexpr uint64_t kSeed = 20240607;

constexpr size_t kMostMoreMemory = size_t{kInstrumented ? 1024 : 64} << 20;

TEST(Cancellation, LostInterestChangesNothingForOthersAndLeavesNothingBehind) {
  CancellationRig rig(kRanks, kClients, kSeed);
  // All that is made once is made before the baseline is taken.
  rig.load().Run({.injections = kInjections / 4});
  rig.ExpectRest();
  const Usage before = rig.UsageOfCoordinator();

  rig.load().Run({.injections = kInjections - kInjections / 4});
  rig.ExpectRest();
  EXPECT_EQ(rig.load().injections(), kInjections);
  EXPECT_TRUE(Eventually(kPatience, [&] { return rig.UsageOfCoordinator().files == before.files; }))
      << rig.UsageOfCoordinator().files << " files open, " << before.files << " before";
  EXPECT_LT(rig.UsageOfCoordinator().resident, before.resident + kMostMoreMemory);
  rig.ExpectEnd();
}

TEST(Trend, IsTheMedianOfTheSlopesBetweenPairs) {
  std::vector<Sample> samples;
  for (int i = 0; i < 20; ++i) samples.push_back({double(i), 7.0 + 3.0 * i});
  EXPECT_DOUBLE_EQ(TheilSenSlope(samples), 3.0);
  // A few odd ones change nothing, wherever they are.
  samples[0].y = 1e6;
  samples[9].y = -1e6;
  samples[19].y = 1e6;
  EXPECT_NEAR(TheilSenSlope(samples), 3.0, 1e-9);
  // Of one step up and none after it little is left; of a steady climb all.
  std::vector<Sample> step;
  for (int i = 0; i < 20; ++i) step.push_back({double(i), i < 2 ? 0.0 : 100.0});
  EXPECT_DOUBLE_EQ(TheilSenSlope(step), 0.0);
  EXPECT_DOUBLE_EQ(TheilSenSlope({}), 0.0);
  EXPECT_DOUBLE_EQ(TheilSenSlope({{1, 1}, {1, 5}}), 0.0) << "no two differ in x";
  EXPECT_DOUBLE_EQ(TheilSenSlope({{0, 0}, {1, 1}, {2, 4}}), 2.0) << "slopes 1, 2, 3";
  EXPECT_DOUBLE_EQ(TheilSenSlope({{0, 0}, {0, 2}, {1, 4}}), 3.0) << "slopes 2, 4";
}

}  // namespace
}  // namespace tributary::test
