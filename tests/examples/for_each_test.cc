#include "examples/tinylm/for_each.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace tributary::tinylm {
namespace {

TEST(ForEach, WorksOnEveryItemOnce) {
  for (const int threads : {1, 3, 9}) {
    std::vector<std::atomic<int>> taken(7);
    const absl::Status status = ForEach(7, threads, [&](int64_t item, int thread) {
      EXPECT_GE(thread, 0);
      EXPECT_LT(thread, threads);
      ++taken[item];
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    for (const std::atomic<int>& times : taken) EXPECT_EQ(times, 1) << threads << " threads";
  }
}

TEST(ForEach, GivesNoThreadTwoItemsAtATime) {
  std::vector<std::atomic<int>> busy(4);
  const absl::Status status = ForEach(500, 4, [&](int64_t, int thread) {
    EXPECT_EQ(busy[thread]++, 0);
    --busy[thread];
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ForEach, EndsWithTheFirstError) {
  int64_t last = -1;
  const absl::Status status = ForEach(10, 1, [&](int64_t item, int) {
    last = item;
    return item == 3 ? absl::NotFoundError("three") : absl::OkStatus();
  });
  EXPECT_EQ(status, absl::NotFoundError("three"));
  EXPECT_EQ(last, 3);
}

TEST(ForEach, HasNothingToDoWithoutItems) {
  EXPECT_TRUE(ForEach(0, 2, [](int64_t, int) { return absl::InternalError("called"); }).ok());
}

}  // namespace
}  // namespace tributary::tinylm
