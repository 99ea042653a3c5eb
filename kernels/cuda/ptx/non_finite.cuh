// Finding elements that are infinite or NaN in words of packed elements.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace tributary::cuda {

// One bit, the highest, in each element of a word that is not finite. Without its sign such an
// element is at least the type's infinity (e4m3 has none: its NaN), and adding what that lacks to
// the sign bit sets the sign bit.
template <DType kType>
__device__ __forceinline__ uint32_t NonFiniteBits(uint32_t word) {
  if constexpr (SizeOf(kType) == 1) {
    constexpr uint32_t kLacking = kType == DType::kFp8E4M3 ? 0x01010101u : 0x04040404u;
    return ((word & 0x7f7f7f7fu) + kLacking) & 0x80808080u;
  } else {
    constexpr uint32_t kLacking = kType == DType::kBf16 ? 0x00800080u : 0x04000400u;
    return ((word & 0x7fff7fffu) + kLacking) & 0x80008000u;
  }
}

// All bits of the elements of a word that are not finite.
template <DType kType>
__device__ __forceinline__ uint32_t NonFiniteMask(uint32_t word) {
  const uint32_t bits = NonFiniteBits<kType>(word);
  if constexpr (SizeOf(kType) == 1) return (bits >> 7) * 0xffu;
  return (bits >> 15) * 0xffffu;
}

// Takes what is not finite out of 16 bytes.
template <DType kType>
__device__ __forceinline__ uint4 FiniteOnly(const uint4& x) {
  return make_uint4(x.x & ~NonFiniteMask<kType>(x.x), x.y & ~NonFiniteMask<kType>(x.y),
                    x.z & ~NonFiniteMask<kType>(x.z), x.w & ~NonFiniteMask<kType>(x.w));
}

// Element `index` of a word, if it is not finite, in fp32; else 0.
template <DType kType>
__device__ __forceinline__ float NonFiniteOrZero(uint32_t word, int index) {
  constexpr int kBits = 8 * static_cast<int>(SizeOf(kType));
  const uint32_t bits = word << (32 - kBits - kBits * index) & ~0u << (32 - kBits);
  if (NonFiniteBits<kType>(bits) == 0) return 0.0f;
  if constexpr (kType == DType::kFp8E4M3) return __int_as_float(0x7fffffff);
  if constexpr (kType == DType::kBf16) return __uint_as_float(bits);
  // An exponent of five ones becomes one of eight, and the fraction moves behind it.
  return __uint_as_float((bits & 0x80000000u) | 0x7f800000u | (bits & 0x03ffffffu) >> 3);
}

// Collects whether any of many words has an element that is not finite, one or two instructions for
// each word.
template <DType kType>
class NonFiniteSearch {
 public:
  // Words are looked at in two chains of instructions, even ones and odd ones.
  __device__ __forceinline__ void Look(uint32_t word, int chain) {
    uint32_t& found = found_[chain % 2];
    if constexpr (kType == DType::kBf16) {
      // Zero times the element is zero, or NaN if it is not finite.
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(word), "r"(0u));
    } else if constexpr (kType == DType::kF16) {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(found) : "r"(word), "r"(0u));
    } else {
      found |= NonFiniteBits<kType>(word);
    }
  }
  __device__ __forceinline__ void Look(const uint4& words) {
    Look(words.x, 0), Look(words.y, 1), Look(words.z, 0), Look(words.w, 1);
  }
  __device__ __forceinline__ bool Found() const {
    if constexpr (SizeOf(kType) == 1) return (found_[0] | found_[1]) != 0;
    return (NonFiniteBits<kType>(found_[0]) | NonFiniteBits<kType>(found_[1])) != 0;
  }

 private:
  uint32_t found_[2] = {};
};

}  // namespace tributary::cuda
