// Masks of rows against looking at every key.
#include "kernels/row_mask.h"

#include <gtest/gtest.h>

namespace tributary::test {
namespace {

bool Sees(const RowMask& mask, int64_t first, int32_t rows, int32_t row, int64_t key) {
  const int64_t position = first + row;
  const int64_t base = mask.base == WindowBase::kAnchor ? first : position;
  if (key < 0 || key >= first + rows) return false;
  if (mask.causal && key > position) return false;
  if (mask.window.left >= 0 && key < base - mask.window.left) return false;
  return mask.window.right < 0 || key <= base + mask.window.right;
}

template <typename Check>
void ForEachMask(const Check& check) {
  for (const int64_t left : {-1, 0, 1, 3, 9, 1000}) {
    for (const int64_t right : {-1, 0, 2, 1000}) {
      for (const WindowBase base : {WindowBase::kQuery, WindowBase::kAnchor}) {
        for (const bool causal : {false, true}) {
          check(RowMask{.window = {left, right}, .base = base, .causal = causal});
        }
      }
    }
  }
}

TEST(RowMaskTest, RowsSeeExactlyTheKeysInsideTheMask) {
  ForEachMask([](const RowMask& mask) {
    for (const int64_t first : {0, 1, 7}) {
      for (const int32_t rows : {1, 2, 8}) {
        for (int32_t row = 0; row < rows; ++row) {
          const KeyRange range = VisibleKeys(mask, first, rows, row);
          for (int64_t key = 0; key < first + rows + 2; ++key) {
            ASSERT_EQ(key >= range.lo && key < range.hi, Sees(mask, first, rows, row, key))
                << "window " << mask.window.left << ", " << mask.window.right << " base "
                << static_cast<int>(mask.base) << " causal " << mask.causal << ": " << rows
                << " rows at " << first << ", row " << row << ", key " << key;
            if (Sees(mask, first, rows, row, key)) {
              ASSERT_GE(key, FirstVisible(mask.window, first));
            }
          }
        }
      }
    }
  });
}

TEST(RowMaskTest, ARangeSplitsIntoContextAndBlock) {
  for (int64_t lo = 0; lo < 9; ++lo) {
    for (int64_t hi = 0; hi < 9; ++hi) {
      for (int64_t at = 0; at < 9; ++at) {
        const SplitRange split = SplitAt({lo, hi}, at);
        for (int64_t key = 0; key < 9; ++key) {
          const bool inside = key >= lo && key < hi;
          ASSERT_EQ(key >= split.context.lo && key < split.context.hi, inside && key < at);
          ASSERT_EQ(key - at >= split.block.lo && key - at < split.block.hi, inside && key >= at);
        }
      }
    }
  }
}

TEST(RowMaskTest, IsUsableInConstantExpressions) {
  constexpr RowMask kSliding{.window = {4, 4}, .causal = false};
  static_assert(VisibleKeys(kSliding, 100, 8, 3).lo == 99);
  static_assert(VisibleKeys(kSliding, 100, 8, 3).hi == 108);
  static_assert(VisibleKeys(kSliding, 100, 8, 2).hi == 107);
  static_assert(SplitAt({99, 108}, 100).context.hi == 100);
  static_assert(SplitAt({99, 108}, 100).block.hi == 8);
  static_assert(FirstVisible({4, -1}, 3) == 0);
}

}  // namespace
}  // namespace tributary::test
