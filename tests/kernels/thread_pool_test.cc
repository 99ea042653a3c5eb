#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tributary::test {
namespace {

TEST(ThreadPoolTest, EveryPartRunsOnce) {
  for (const int threads : {1, 2, 5}) {
    cpu::ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const int parts : {0, 1, 2, 3, 100}) {
      std::vector<std::atomic<int>> runs(parts);
      pool.Run(parts, [&](int part) { ++runs[part]; });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

// Jobs follow one another at once: a helper that is late for one must not disturb the next.
TEST(ThreadPoolTest, ManyShortJobs) {
  cpu::ThreadPool pool(4);
  for (int job = 0; job < 2000; ++job) {
    std::atomic<int> sum{0};
    pool.Run(7, [&](int part) { sum += part + 1; });
    ASSERT_EQ(sum, 28);
  }
}

TEST(ThreadPoolTest, CallersShareThePool) {
  cpu::ThreadPool pool(3);
  std::vector<int> sums(4);
  std::vector<std::thread> callers;
  for (size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&, c] {
      for (int job = 0; job < 300; ++job) {
        std::atomic<int> sum{0};
        pool.Run(5, [&](int part) { sum += part + 1; });
        sums[c] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int sum : sums) EXPECT_EQ(sum, 300 * 15);
}

// The caller's own thread takes part: parts that wait for each other all run at the same time.
TEST(ThreadPoolTest, AllThreadsRunTogether) {
  cpu::ThreadPool pool(4);
  std::atomic<int> arrived{0};
  pool.Run(4, [&](int) {
    ++arrived;
    arrived.notify_all();
    for (int seen = arrived; seen < 4; seen = arrived) arrived.wait(seen);
  });
  EXPECT_EQ(arrived, 4);
}

}  // namespace
}  // namespace tributary::test
