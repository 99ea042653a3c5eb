// The soft cap of logits, as kernels on GPUs take it.
#pragma once

#include <algorithm>

namespace tributary {

// Bounds of a soft cap between which quotients of a logit and the cap neither overflow nor lose
// precision in fp32. A cap beyond either changes no result: one so large leaves all logits of fp32
// queries and keys as they are, and under one so small all logits are alike.
inline constexpr float kLargestSoftCap = 0x1p100f;
inline constexpr float kSmallestSoftCap = 0x1p-64f;

// The cap that a kernel is launched with. 0 stands for none.
constexpr float BoundedSoftCap(float soft_cap) {
  return soft_cap > 0.0f ? std::clamp(soft_cap, kSmallestSoftCap, kLargestSoftCap) : 0.0f;
}

}  // namespace tributary
