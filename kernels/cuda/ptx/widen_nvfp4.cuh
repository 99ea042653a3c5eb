// From codes of NVFP4 to f16, in registers and exactly.
//
// The three bits of an e2m1 magnitude, put where the last two bits of an f16's exponent and the
// first one of its mantissa are, are 2^-14 of its value, subnormals included. A block's scale has
// four significant bits and is no smaller than 2^-9, so that its product with such an element is
// exact in f16, too: a multiple of 2^-24 of six bits. What sums are short of is made good where
// they are scaled (ElementUnit).
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

__device__ __forceinline__ uint32_t MultiplyPairs(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The eight codes of a word (nvfp4_layout.h) as four pairs, the pair of numbers 0 and 1 of the
// codes that are not high first.
__device__ __forceinline__ void WidenCodes(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kCodes = 0x8e008e00u;
  pairs[0] = word & kCodes;
  pairs[1] = word << 8 & kCodes;
  // The high codes, where the others have been.
  const uint32_t high = (word << 7 & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
  pairs[2] = high & 0xff00ff00u;
  pairs[3] = __byte_perm(high, 0, 0x2404);
}

// The first and the second of a pair, twice.
__device__ __forceinline__ uint32_t FirstTwice(uint32_t pair) {
  return __byte_perm(pair, 0, 0x1010);
}
__device__ __forceinline__ uint32_t SecondTwice(uint32_t pair) {
  return __byte_perm(pair, 0, 0x3232);
}

// A word of V, two dimensions of four tokens, as operand A of a product over 16 tokens. `scales`
// has the tokens' scales, a byte each.
__device__ __forceinline__ void WidenValueWord(uint32_t word, uint32_t scales, uint32_t (&a)[4]) {
  const uint32_t low = WidenE4M3<false>(scales);
  const uint32_t high = WidenE4M3<true>(scales);
  uint32_t pairs[4];
  WidenCodes(word, pairs);
  a[0] = MultiplyPairs(pairs[0], low);
  a[2] = MultiplyPairs(pairs[1], high);
  a[1] = MultiplyPairs(pairs[2], low);
  a[3] = MultiplyPairs(pairs[3], high);
}

}  // namespace tributary::cuda
