// Every mask is a range.
//
// Tokens of a sequence are dealt to ranks `interleave` tokens at a time. A rank keeps its tokens
// in order, densely, in local slots 0, 1, 2, ... . So the number of a rank's tokens before global
// position t is LocalLength(layout, t), and any contiguous range of global positions [lo, hi) is
// the contiguous range [LocalLength(lo), LocalLength(hi)) of local slots. Causal decode, verify,
// sliding windows, a DFlash block and padding differ only in the global range they start from.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__CUDACC__)
#define TRIBUTARY_HOST_DEVICE __host__ __device__
#else
#define TRIBUTARY_HOST_DEVICE
#endif

namespace tributary {

// A rank's place in the decode-context-parallel group.
struct DcpLayout {
  int32_t rank = 0;
  int32_t size = 1;        // N
  int32_t interleave = 1;  // I, tokens; 1 <= I <= page_size and page_size % I == 0
};

// Half open. Empty when hi <= lo.
struct KeyRange {
  int64_t lo = 0;
  int64_t hi = 0;
};

TRIBUTARY_HOST_DEVICE constexpr bool Empty(KeyRange r) { return r.hi <= r.lo; }
TRIBUTARY_HOST_DEVICE constexpr int64_t Length(KeyRange r) { return Empty(r) ? 0 : r.hi - r.lo; }

// The rank that holds token t.
TRIBUTARY_HOST_DEVICE constexpr int32_t OwnerOf(const DcpLayout& d, int64_t t) {
  return static_cast<int32_t>((t / d.interleave) % d.size);
}

// The local slot of token t on its owner.
TRIBUTARY_HOST_DEVICE constexpr int64_t LocalSlot(const DcpLayout& d, int64_t t) {
  return (t / (int64_t{d.size} * d.interleave)) * d.interleave + t % d.interleave;
}

// The inverse: the global position of a rank's local slot.
TRIBUTARY_HOST_DEVICE constexpr int64_t GlobalPosition(const DcpLayout& d, int64_t slot) {
  const int64_t round = slot / d.interleave;
  return (round * d.size + d.rank) * d.interleave + slot % d.interleave;
}

// How many of the first `length` tokens the rank holds.
TRIBUTARY_HOST_DEVICE constexpr int64_t LocalLength(const DcpLayout& d, int64_t length) {
  const int64_t turn = int64_t{d.size} * d.interleave;
  const int64_t rest = length % turn - int64_t{d.rank} * d.interleave;
  const int64_t clamped = rest < 0 ? 0 : (rest > d.interleave ? d.interleave : rest);
  return (length / turn) * d.interleave + clamped;
}

// Global positions [lo, hi) as the rank's local slots.
TRIBUTARY_HOST_DEVICE constexpr KeyRange LocalRange(const DcpLayout& d, KeyRange global) {
  if (Empty(global)) return {0, 0};
  // Without a window a range begins at 0: that is known without a division.
  return {global.lo == 0 ? 0 : LocalLength(d, global.lo), LocalLength(d, global.hi)};
}

// A sliding window around a query position; -1 means unbounded on that side. A key at position k is
// inside when position - left <= k <= position + right.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
};

// The keys in [0, limit) that a query at `position` sees through `window`.
// A causal row passes limit = position + 1.
TRIBUTARY_HOST_DEVICE constexpr KeyRange VisibleKeys(int64_t position, Window window,
                                                     int64_t limit) {
  int64_t lo = 0;
  int64_t hi = limit;
  if (window.left >= 0 && position - window.left > lo) lo = position - window.left;
  if (window.right >= 0 && position + window.right + 1 < hi) hi = position + window.right + 1;
  return hi <= lo ? KeyRange{0, 0} : KeyRange{lo, hi};
}

}  // namespace tributary
