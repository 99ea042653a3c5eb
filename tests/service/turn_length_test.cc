// How long turns of long calls are, by what else has come.
#include "service/schedule/turn_length.h"

#include <gtest/gtest.h>

#include <chrono>

namespace tributary::service {
namespace {

using std::chrono::milliseconds;
using worker::StepKind;

constexpr double kRate = 1e10;  // 2.5e6 in a quarter of a millisecond
constexpr double kTurn = 2.5e6;

class TurnLengthTest : public ::testing::Test {
 protected:
  double Flops(StepKind kind = StepKind::kDecode) const {
    return turns_.FlopsOfTurn(kind, now_, kRate);
  }

  TurnLength turns_{milliseconds(20)};
  TurnLength::Clock::time_point now_ = TurnLength::Clock::time_point() + std::chrono::hours(1);
};

TEST_F(TurnLengthTest, WhoIsAloneTakesAllTheTimeItNeeds) {
  EXPECT_GT(Flops(), 1e300);
  turns_.OnCall(now_, 1e12);
  EXPECT_EQ(Flops(), 1e12) << "no longer than the shortest call";
}

TEST_F(TurnLengthTest, ShortCallsMakeTurnsShortForAWhile) {
  turns_.OnCall(now_, 1e12);
  turns_.OnCall(now_, 100);
  EXPECT_EQ(Flops(), kTurn) << "and not as short as a short call";
  now_ += milliseconds(19);
  turns_.OnCall(now_, 1e12);
  EXPECT_EQ(Flops(), kTurn);
  now_ += milliseconds(15);  // another span: the one before it counts
  turns_.OnCall(now_, 1e12);
  EXPECT_EQ(Flops(), kTurn);
  now_ += milliseconds(20);
  turns_.OnCall(now_, 1e12);
  EXPECT_EQ(Flops(), 1e12);
  now_ += milliseconds(40);
  EXPECT_GT(Flops(), 1e300);
}

TEST_F(TurnLengthTest, ATurnIsAsMuchAsWorkersHaveShownToDoInItsTime) {
  turns_.OnCall(now_, 100);
  turns_.OnStep(StepKind::kDecode, 1000, 1e-3, kRate);  // next to no work
  EXPECT_EQ(Flops(), kTurn);
  for (int i = 0; i < 100; ++i) turns_.OnStep(StepKind::kDecode, Flops(), Flops() / 4e10, kRate);
  EXPECT_NEAR(Flops(), 4 * kTurn, 0.01 * kTurn);
  EXPECT_EQ(Flops(StepKind::kPrefill), kTurn) << "of which none has been shown";
  turns_.OnStep(StepKind::kDecode, Flops(), 3600, kRate);  // something held it up
  EXPECT_GT(Flops(), kTurn);
  for (int i = 0; i < 100; ++i) turns_.OnStep(StepKind::kDecode, Flops(), 3600, kRate);
  EXPECT_NEAR(Flops(), kTurn / 4, 0.01 * kTurn);
}

TEST_F(TurnLengthTest, WithoutMemoryNobodyTakesTurns) {
  TurnLength none(milliseconds(0));
  none.OnCall(now_, 1);
  EXPECT_GT(none.FlopsOfTurn(StepKind::kDecode, now_, kRate), 1e300);
}

}  // namespace
}  // namespace tributary::service
