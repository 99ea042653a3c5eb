// How much of a step the calls of one caller may be, by who else has called.
#include "service/schedule/caller_share.h"

#include <gtest/gtest.h>

#include <chrono>

namespace tributary::service {
namespace {

using std::chrono::milliseconds;

class CallerShareTest : public ::testing::Test {
 protected:
  CallerShare callers_{milliseconds(20)};
  CallerShare::Clock::time_point now_ = CallerShare::Clock::time_point() + std::chrono::hours(1);
};

TEST_F(CallerShareTest, WhoIsAloneMayTakeAll) {
  EXPECT_EQ(callers_.MostOfOne(now_), CallerShare::kNoLimit);
  callers_.OnCall(now_, "many", 1.0 / 16);
  callers_.OnCall(now_, "many", 8);
  EXPECT_EQ(callers_.MostOfOne(now_), CallerShare::kNoLimit);
  callers_.OnCall(now_ + milliseconds(25), "many", 1.0 / 16);
  EXPECT_EQ(callers_.MostOfOne(now_ + milliseconds(25)), CallerShare::kNoLimit);
}

TEST_F(CallerShareTest, TheMostThatACallerHadAtATimeIsRemembered) {
  callers_.OnCall(now_, "many", 1.0 / 16);
  callers_.OnCall(now_, "many", 8);
  callers_.OnCall(now_, "many", 2);
  EXPECT_EQ(callers_.PeakOf("many", now_), 8);
  EXPECT_EQ(callers_.PeakOf("other", now_), 0);
  now_ += milliseconds(25);
  callers_.OnCall(now_, "many", 1.0 / 16);
  EXPECT_EQ(callers_.PeakOf("many", now_), 8) << "a moment ago";
  EXPECT_EQ(callers_.PeakOf("many", now_ + milliseconds(15)), 1.0 / 16);
}

TEST_F(CallerShareTest, BesideOneWhoHasFewOthersGetATurn) {
  callers_.OnCall(now_, "many", 8);
  callers_.OnCall(now_, "few", 1.0 / 16);
  EXPECT_EQ(callers_.MostOfOne(now_), 1);
  now_ += milliseconds(30);  // another span: the one before it counts
  callers_.OnCall(now_, "many", 8);
  EXPECT_EQ(callers_.MostOfOne(now_), 1);
  now_ += milliseconds(20);
  callers_.OnCall(now_, "many", 8);
  EXPECT_EQ(callers_.MostOfOne(now_), CallerShare::kNoLimit) << "the other has left";
  now_ += milliseconds(25);  // one in each span
  callers_.OnCall(now_, "few", 1.0 / 16);
  EXPECT_EQ(callers_.MostOfOne(now_), 1);
}

TEST_F(CallerShareTest, WhereAllHaveManyAStepTakesAsMany) {
  callers_.OnCall(now_, "many", 8);
  callers_.OnCall(now_, "as many", 6);
  EXPECT_EQ(callers_.MostOfOne(now_), 6);
}

TEST_F(CallerShareTest, WithoutMemoryThereIsNoLimit) {
  CallerShare none{milliseconds(0)};
  none.OnCall(now_, "few", 1.0 / 16);
  EXPECT_EQ(none.MostOfOne(now_), CallerShare::kNoLimit);
}

}  // namespace
}  // namespace tributary::service
