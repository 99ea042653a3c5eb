// The sequences that a case of attention is over, and which keys their rows see.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/key_range.h"

namespace tributary::cuda {

struct Sequence {
  int64_t length = 0;  // slots with keys
  int32_t rows = 1;
  // The range of row i; by default causal, the last row seeing everything.
  int64_t window = -1;
  bool causal = true;
};

// Row i is at position length - rows + i.
inline KeyRange RangeOfRow(const Sequence& s, int32_t row) {
  const int64_t position = s.length - s.rows + row;
  if (position < 0) return {0, 0};
  return VisibleKeys(position, {s.window, -1}, s.causal ? position + 1 : s.length);
}

// " sequences 4096x4w100 80x16full": the length and rows of each, its window, and whether it is not
// causal.
inline std::string Describe(const std::vector<Sequence>& sequences) {
  std::string text = " sequences";
  for (const Sequence& s : sequences) {
    text += " " + std::to_string(s.length) + "x" + std::to_string(s.rows);
    if (s.window >= 0) text += "w" + std::to_string(s.window);
    if (!s.causal) text += "full";
  }
  return text;
}

}  // namespace tributary::cuda
