// Key ranges against dealing the tokens out one by one.
#include "kernels/key_range.h"

#include <gtest/gtest.h>

#include <vector>

namespace tributary::test {
namespace {

TEST(KeyRangeTest, DealingTokensOneByOneGivesTheSamePlaces) {
  for (const int32_t size : {1, 2, 3, 4, 8}) {
    for (const int32_t interleave : {1, 2, 8, 16, 64}) {
      std::vector<int64_t> held(size);  // tokens each rank has so far
      const int64_t tokens = 3 * size * interleave + interleave / 2 + 1;
      for (int64_t t = 0; t < tokens; ++t) {
        const auto owner = static_cast<int32_t>(t / interleave % size);
        for (int32_t rank = 0; rank < size; ++rank) {
          const DcpLayout layout{rank, size, interleave};
          ASSERT_EQ(LocalLength(layout, t), held[rank]) << size << " " << interleave << " " << t;
          ASSERT_EQ(OwnerOf(layout, t), owner);
        }
        const DcpLayout layout{owner, size, interleave};
        ASSERT_EQ(LocalSlot(layout, t), held[owner]);
        ASSERT_EQ(GlobalPosition(layout, held[owner]), t);
        ++held[owner];
      }
    }
  }
}

TEST(KeyRangeTest, LocalRangesHoldExactlyTheTokensOfTheGlobalRange) {
  for (const int32_t size : {1, 2, 3, 4}) {
    for (const int32_t interleave : {1, 4, 16}) {
      const int64_t tokens = 2 * size * interleave + 3;
      for (int32_t rank = 0; rank < size; ++rank) {
        const DcpLayout layout{rank, size, interleave};
        for (int64_t lo = 0; lo <= tokens; lo += 3) {
          for (int64_t hi = 0; hi <= tokens; hi += 5) {
            const KeyRange local = LocalRange(layout, {lo, hi});
            int64_t count = 0;
            for (int64_t t = lo; t < hi; ++t) {
              if (OwnerOf(layout, t) != rank) continue;
              ++count;
              ASSERT_GE(LocalSlot(layout, t), local.lo);
              ASSERT_LT(LocalSlot(layout, t), local.hi);
            }
            ASSERT_EQ(Length(local), count) << size << " " << interleave << " " << lo << " " << hi;
          }
        }
      }
    }
  }
}

TEST(KeyRangeTest, VisibleKeysAreThoseInsideTheWindow) {
  for (const int64_t left : {-1, 0, 1, 5, 100}) {
    for (const int64_t right : {-1, 0, 2, 100}) {
      for (int64_t position = 0; position < 12; ++position) {
        for (int64_t limit = 0; limit <= 14; ++limit) {
          const KeyRange range = VisibleKeys(position, {left, right}, limit);
          for (int64_t k = 0; k < 14; ++k) {
            const bool inside = k < limit && (left < 0 || k >= position - left) &&
                                (right < 0 || k <= position + right);
            ASSERT_EQ(k >= range.lo && k < range.hi, inside)
                << "window " << left << ", " << right << ", position " << position << ", limit "
                << limit << ", key " << k;
          }
        }
      }
    }
  }
}

TEST(KeyRangeTest, EmptyRangesHaveNoLength) {
  EXPECT_TRUE(Empty(KeyRange{3, 3}));
  EXPECT_TRUE(Empty(KeyRange{4, 3}));
  EXPECT_EQ(Length({4, 3}), 0);
  EXPECT_EQ(Length(LocalRange({1, 4, 16}, {5, 2})), 0);
}

// Positions of millions of tokens over many ranks stay exact.
TEST(KeyRangeTest, LongSequencesDoNotOverflow) {
  const DcpLayout layout{7, 8, 64};
  const int64_t tokens = int64_t{1} << 42;
  EXPECT_EQ(LocalLength(layout, tokens), tokens / 8);
  EXPECT_EQ(GlobalPosition(layout, tokens / 8 - 1), tokens - 1);
}

}  // namespace
}  // namespace tributary::test
