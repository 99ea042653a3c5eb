#include "service/api/open_calls.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>

namespace tributary::service {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kLong{60};

TEST(OpenCalls, AreWaitedForUntilTheyAreOver) {
  const auto open = OpenCalls::Create();
  EXPECT_TRUE(open->WaitUntilOver(Clock::now()));
  OpenCalls::Mark first = open->Enter();
  OpenCalls::Mark second = open->Enter();
  EXPECT_FALSE(open->WaitUntilOver(Clock::now()));
  auto waits =
      std::async(std::launch::async, [&] { return open->WaitUntilOver(Clock::now() + kLong); });
  first = nullptr;
  second = nullptr;
  EXPECT_TRUE(waits.get());
}

TEST(OpenCalls, OfAllRoundsAreCounted) {
  const auto open = OpenCalls::Create();
  OpenCalls::Mark before = open->Enter();
  EXPECT_FALSE(open->WaitUntilOver(Clock::now()));
  OpenCalls::Mark later = open->Enter();
  before = nullptr;
  EXPECT_FALSE(open->WaitUntilOver(Clock::now()));
  later = nullptr;
  EXPECT_TRUE(open->WaitUntilOver(Clock::now()));
}

TEST(OpenCalls, MayOutliveTheirCount) {
  auto open = OpenCalls::Create();
  const OpenCalls::Mark mark = open->Enter();
  open = nullptr;
}

}  // namespace
}  // namespace tributary::service
