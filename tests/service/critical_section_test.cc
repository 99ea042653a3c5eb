// The coordinator's lock: what happens when a critical section ends, and in which order.
#include "service/coordinator/critical_section.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace tributary::service {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CriticalSectionTest : public ::testing::Test, private EndOfSection {
 protected:
  CriticalSectionTest() : lock_(this) {}

  int64_t OpenCalls() {
    const ReadSection section(lock_);
    return lock_.open_calls();
  }

  CoordinatorLock lock_;
  std::vector<std::string> events_;
  std::string deferred_at_end_;

 private:
  void BeforeRelease() override TRIBUTARY_LOCKED {
    events_.push_back("before release");
    if (deferred_at_end_.empty()) return;
    lock_.Defer([this] { events_.push_back(deferred_at_end_); });
  }
  void AfterRelease() override { events_.push_back("after release"); }
};

TEST_F(CriticalSectionTest, DeferredCallsComeAfterTheReleaseInOrder) {
  deferred_at_end_ = "by the end";
  {
    const CriticalSection section(lock_);
    lock_.Defer([this] { events_.push_back("first"); });
    lock_.Defer([this] { events_.push_back("second"); });
    EXPECT_THAT(events_, IsEmpty());
  }
  EXPECT_THAT(events_,
              ElementsAre("before release", "first", "second", "by the end", "after release"));
}

TEST_F(CriticalSectionTest, ADeferredCallMayTakeTheLock) {
  {
    const CriticalSection section(lock_);
    lock_.Defer([this] { const CriticalSection inner(lock_); });
  }
  EXPECT_THAT(events_,
              ElementsAre("before release", "before release", "after release", "after release"));
}

TEST_F(CriticalSectionTest, LookingBeginsNothing) {
  EXPECT_EQ(OpenCalls(), 0);
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(CriticalSectionTest, ACallIsOpenUntilItsAnswerWasGiven) {
  int64_t open_during_answer = 0;
  {
    const CriticalSection section(lock_);
    for (int i = 0; i < 3; ++i) lock_.AcceptCall();
    lock_.Answer([&] { open_during_answer = OpenCalls(); }, 2);
  }
  EXPECT_EQ(open_during_answer, 3);
  EXPECT_EQ(OpenCalls(), 1);
}

TEST_F(CriticalSectionTest, WorkersDoNotWaitForManyAnswers) {
  const auto order_of = [this](int64_t answers) {
    events_.clear();
    const CriticalSection section(lock_);
    for (int64_t i = 0; i < answers; ++i) lock_.AcceptCall();
    lock_.Answer([this] { events_.push_back("answers"); }, answers);
  };
  order_of(8);
  EXPECT_THAT(events_, ElementsAre("before release", "answers", "after release"));
  order_of(9);
  EXPECT_THAT(events_, ElementsAre("before release", "after release", "answers"));
}

TEST_F(CriticalSectionTest, WaitIdleWaitsForTheLastAnswer) {
  {
    const CriticalSection section(lock_);
    lock_.AcceptCall();
  }
  EXPECT_FALSE(lock_.WaitIdle(CoordinatorLock::Clock::now() + milliseconds(1)));
  std::thread answering([this] {
    const CriticalSection section(lock_);
    lock_.Answer([] {});
  });
  EXPECT_TRUE(lock_.WaitIdle(CoordinatorLock::Clock::now() + std::chrono::seconds(60)));
  answering.join();
}

}  // namespace
}  // namespace tributary::service
