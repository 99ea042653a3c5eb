// Division where most numbers are ordinary: with the bits of the operator, in three instructions.
#pragma once

#include <cstdint>

#include "kernels/nvfp4.h"

namespace tributary::cuda {

// The bits of the largest magnitude of a thread's numbers; NaN is larger than any number.
template <int kCount>
__device__ __forceinline__ uint32_t LargestMagnitude(const float (&x)[kCount]) {
  uint32_t largest = 0;
#pragma unroll
  for (const float number : x) largest = max(largest, MagnitudeBits(number));
  return largest;
}

// The inverse of a divisor that DividesQuickly knows, with the bits of __frcp_rn, which looks
// whether it is one.
__device__ __forceinline__ float QuickInverse(float divisor) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  return fmaf(inverse, fmaf(-divisor, inverse, 1.0f), inverse);
}

// Quotients rounded as division rounds them: a product with the inverse, corrected by what is left
// of x (Markstein, "Computation of elementary functions on the IBM RISC System/6000"). Exact unless
// something over- or underflows; a zero may lose its sign.
__device__ __forceinline__ float QuickQuotient(float x, float divisor, float inverse) {
  const float q = x * inverse;
  return fmaf(fmaf(-q, divisor, x), inverse, q);
}

// Whether QuickQuotient divides numbers of up to this LargestMagnitude for whoever rounds the
// quotient to eight bits or fewer: nothing in between overflows, and what underflows is nothing
// beside the magnitudes that become zero.
__device__ __forceinline__ bool DividesQuickly(uint32_t largest, float divisor) {
  return divisor > 0x1p-40f && divisor < 0x1p40f && largest < 0x5d800000u;  // 2^60
}

}  // namespace tributary::cuda
