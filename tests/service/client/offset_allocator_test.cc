#include "service/client/offset_allocator.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tributary::client {
namespace {

TEST(OffsetAllocator, HandsOutAlignedRangesUntilFull) {
  OffsetAllocator room(4 * 64);
  EXPECT_EQ(room.Allocate(1), 0u);
  EXPECT_EQ(room.Allocate(65), 64u);
  EXPECT_EQ(room.Allocate(65), std::nullopt);
  EXPECT_EQ(room.Allocate(64), 192u);
  EXPECT_EQ(room.used(), 4u * 64);
  EXPECT_EQ(room.Allocate(1), std::nullopt);
}

TEST(OffsetAllocator, RefusesNothingAndEverything) {
  OffsetAllocator room(1024);
  EXPECT_EQ(room.Allocate(0), std::nullopt);
  EXPECT_EQ(room.Allocate(1025), std::nullopt);
  EXPECT_EQ(room.Allocate(UINT64_MAX), std::nullopt);
  EXPECT_EQ(OffsetAllocator(63).Allocate(1), std::nullopt);
  EXPECT_EQ(room.used(), 0u);
}

TEST(OffsetAllocator, JoinsNeighboursWhateverTheOrderOfReturn) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    OffsetAllocator room(4 * 64);
    std::vector<uint64_t> offsets;
    for (int i = 0; i < 4; ++i) offsets.push_back(*room.Allocate(64));
    for (const int i : order) room.Free(offsets[i], 64);
    EXPECT_EQ(room.Allocate(4 * 64), 0u) << "after " << order[0] << order[1] << order[2];
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(OffsetAllocator, RangesInUseNeverOverlap) {
  constexpr uint64_t kSize = 64 * 1024;
  OffsetAllocator room(kSize);
  std::mt19937 dice(7);
  std::vector<std::pair<uint64_t, uint64_t>> held;
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (dice() % 2 == 0 && !held.empty()) {
      const size_t which = dice() % held.size();
      room.Free(held[which].first, held[which].second);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
      continue;
    }
    const uint64_t bytes = 1 + dice() % 4096;
    const auto offset = room.Allocate(bytes);
    if (!offset.has_value()) {
      ++refused;
      continue;
    }
    ASSERT_LE(*offset + bytes, kSize);
    for (const auto& [other, length] : held) {
      ASSERT_TRUE(*offset + bytes <= other || other + length <= *offset);
    }
    held.emplace_back(*offset, bytes);
  }
  EXPECT_GT(refused, 0) << "the test never filled the room";
  for (const auto& [offset, bytes] : held) room.Free(offset, bytes);
  EXPECT_EQ(room.used(), 0u);
  EXPECT_EQ(room.Allocate(kSize), 0u);
}

}  // namespace
}  // namespace tributary::client
