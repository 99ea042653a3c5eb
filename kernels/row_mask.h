// Which keys the rows of one call see, as ranges of global positions.
//
// A call brings `rows` query rows of a sequence at positions first, first + 1, ... . Keys before
// `first` are its context, keys from `first` on are its block: the tokens of the call itself. What
// a row sees is always one range, so the part of it in the context and the part of it in the block
// are one range each, and attention over the two merges into attention over the whole. Decode,
// verify, prefill and DFlash differ in the mask only.
#pragma once

#include <cstdint>

#include "kernels/key_range.h"

namespace tributary {

// The position a sliding window is laid around.
enum class WindowBase : uint8_t {
  kQuery,   // the row's own: every row has a window of its own
  kAnchor,  // the first row's: all rows of a call share one window
};

struct RowMask {
  Window window;
  WindowBase base = WindowBase::kQuery;
  bool causal = true;  // false: a row also sees the rows of its call that come after it
};

TRIBUTARY_HOST_DEVICE constexpr bool operator==(const RowMask& a, const RowMask& b) {
  return a.window.left == b.window.left && a.window.right == b.window.right && a.base == b.base &&
         a.causal == b.causal;
}

// What row `row` of a call sees of the context and the block together.
TRIBUTARY_HOST_DEVICE constexpr KeyRange VisibleKeys(const RowMask& mask, int64_t first,
                                                     int32_t rows, int32_t row) {
  const int64_t position = first + row;
  return VisibleKeys(mask.base == WindowBase::kAnchor ? first : position, mask.window,
                     mask.causal ? position + 1 : first + rows);
}

// The least position that any row of such a call sees: rows never look further back than the first.
TRIBUTARY_HOST_DEVICE constexpr int64_t FirstVisible(const Window& window, int64_t first) {
  return window.left < 0 || first < window.left ? 0 : first - window.left;
}

// A range cut in two at a position.
struct SplitRange {
  KeyRange context;  // the part before it, global positions
  KeyRange block;    // the part from it on, relative to it
};

TRIBUTARY_HOST_DEVICE constexpr SplitRange SplitAt(KeyRange range, int64_t position) {
  if (Empty(range)) return {};
  SplitRange split;
  if (range.lo < position) {
    split.context = {range.lo, range.hi < position ? range.hi : position};
  }
  if (range.hi > position) {
    split.block = {range.lo > position ? range.lo - position : 0, range.hi - position};
  }
  return split;
}

}  // namespace tributary
