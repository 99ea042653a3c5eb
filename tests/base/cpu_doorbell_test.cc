// Doorbells between threads: counts, sleeping and waking, the status, bounds.
#include "base/mailbox/cpu_doorbell.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace tributary::mailbox {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::chrono::nanoseconds kNoSpin{0};
constexpr std::chrono::nanoseconds kSpin{std::chrono::microseconds(50)};

// The words of a doorbell in memory that is shared, as futexes of two processes need it.
class CpuDoorbellTest : public ::testing::Test {
 protected:
  CpuDoorbellTest()
      : words_(static_cast<uint32_t*>(
            mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~CpuDoorbellTest() override { munmap(words_, 4096); }

  CpuDoorbell there() const { return {words_, words_ + 32}; }
  CpuDoorbell back() const { return {words_ + 64, words_ + 96}; }
  uint32_t* status() const { return words_ + 128; }
  static Clock::time_point In(milliseconds time) { return Clock::now() + time; }

  uint32_t* const words_;
};

TEST_F(CpuDoorbellTest, CountsAreReachedModulo32Bits) {
  const auto look = [&](uint32_t count) {
    return Await(there(), count, status(), kNoSpin, Clock::now());
  };
  EXPECT_EQ(look(0), Awaited::kReached);
  EXPECT_EQ(look(1), Awaited::kTimedOut);
  EXPECT_EQ(look(1 - 16U), Awaited::kReached);  // the slots of a session that begins
  Ring(there(), 0xffffffff);
  EXPECT_EQ(look(0xffffffff), Awaited::kReached);
  EXPECT_EQ(look(0), Awaited::kTimedOut);
  Ring(there(), 0);
  EXPECT_EQ(look(0xffffffff), Awaited::kReached);
  EXPECT_EQ(look(0), Awaited::kReached);
}

TEST_F(CpuDoorbellTest, WhatWasRungCountsBesideTheStatus) {
  Ring(there(), 1);
  SetStatus(status(), 13);
  EXPECT_EQ(Await(there(), 1, status(), kSpin, In(seconds(10))), Awaited::kReached);
  EXPECT_EQ(Await(there(), 2, status(), kSpin, In(seconds(10))), Awaited::kEnded);
  EXPECT_EQ(StatusOf(status()), 13u);
}

TEST_F(CpuDoorbellTest, AWaitEndsByItsBoundWhateverTheOtherSideWrites) {
  const Clock::time_point begin = Clock::now();
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) {
      std::atomic_ref<uint32_t>(*there().sleeps).store(0);  // a hostile one
      Ring(there(), static_cast<uint32_t>(-i));
      std::this_thread::sleep_for(milliseconds(2));
    }
  });
  EXPECT_EQ(Await(there(), 1, status(), kSpin, begin + milliseconds(100)), Awaited::kTimedOut);
  other.join();
  EXPECT_GE(Clock::now() - begin, milliseconds(100));
}

// Both sides sleep and are woken, thousands of times: one lost wake-up would cost 20 ms.
TEST_F(CpuDoorbellTest, NoWakeUpIsLost) {
  constexpr uint32_t kRounds = 5'000;
  std::thread other([&] {
    for (uint32_t i = 1; i <= kRounds; ++i) {
      const auto spin = i % 3 == 0 ? kSpin : kNoSpin;
      if (Await(there(), i, status(), spin, In(seconds(60))) != Awaited::kReached) return;
      Ring(back(), i);
    }
  });
  for (uint32_t i = 1; i <= kRounds; ++i) {
    Ring(there(), i);
    ASSERT_EQ(Await(back(), i, status(), i % 2 == 0 ? kSpin : kNoSpin, In(seconds(60))),
              Awaited::kReached);
  }
  other.join();
}

TEST_F(CpuDoorbellTest, ASleeperFindsTheStatus) {
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    SetStatus(status(), 1);
    Wake(there());
  });
  EXPECT_EQ(Await(there(), 1, status(), kNoSpin, In(seconds(60))), Awaited::kEnded);
  other.join();
}

}  // namespace
}  // namespace tributary::mailbox
