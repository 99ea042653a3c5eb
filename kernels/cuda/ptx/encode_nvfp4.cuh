// New numbers to codes of NVFP4, with the same bits as kernels/nvfp4.h gives.
//
// A few neighbouring threads hold a block of 16 numbers between them, and find its largest
// magnitude together. Each makes the codes of its own numbers; the block's scale comes out alike.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/quotient.cuh"
#include "kernels/nvfp4.h"

namespace tributary::cuda {

// Codes of a thread's numbers, a nibble each, the first one lowest, and their block's scale.
struct Nvfp4Codes {
  uint32_t codes = 0;
  uint8_t scale = 0;

  __device__ uint32_t Code(int d) const { return codes >> 4 * d & 0xfu; }
};

// As Float4E2M1FromFloat, of a number that is none of NaN and infinity; without the sign. A number
// is added to a power of two whose unit in the last place is the step between codes there: 0.5 up
// to 2, then 1, then 2. So the sum's last bits count steps, rounded to nearest even.
__device__ __forceinline__ uint32_t MagnitudeCode(float x) {
  const float magnitude = fminf(fabsf(x), Float4E2M1Format::kMax);
  // The exponents are 0, 1 and 2. Two codes lie between a step count and its code for each.
  const uint32_t power = max(__float_as_uint(magnitude), __float_as_uint(1.0f)) & 0x7f800000u;
  const uint32_t unit = power + (22u << 23);
  const uint32_t steps = __float_as_uint(magnitude + __uint_as_float(unit)) - unit;
  return steps + 2 * ((power >> 23) - 127);
}

// Eight numbers of any block. (In registers: an array would go through memory, and always.)
static __device__ __noinline__ Nvfp4Codes CarefulNvfp4(float4 x, float4 y, uint32_t largest,
                                                       float tensor_scale) {
  Nvfp4Codes block;
  block.scale = Nvfp4BlockScale(largest, tensor_scale);
  const float divisor = Nvfp4Divisor(block.scale, tensor_scale);
  const float numbers[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
  for (int d = 0; d < 8; ++d) block.codes |= uint32_t{Nvfp4Element(numbers[d], divisor)} << 4 * d;
  return block;
}

// Four or eight of the numbers of a block whose largest MagnitudeBits are these.
template <int kCount>
__device__ __forceinline__ Nvfp4Codes EncodeNvfp4(const float (&x)[kCount], uint32_t largest,
                                                  float tensor_scale) {
  static_assert(kCount == 4 || kCount == 8);
  const float of_largest = 6.0f * tensor_scale;
  const uint32_t scale =
      PackE4M3(QuickQuotient(__uint_as_float(largest), of_largest, QuickInverse(of_largest)), 0.0f);
  const float divisor = WidenE4M3(scale) * tensor_scale;
  if (!DividesQuickly(largest, of_largest) || !DividesQuickly(largest, divisor)) {
    constexpr int kSecond = kCount - 4;
    return CarefulNvfp4(make_float4(x[0], x[1], x[2], x[3]),
                        make_float4(x[kSecond], x[kSecond + 1], x[kSecond + 2], x[kSecond + 3]),
                        largest, tensor_scale);
  }
  Nvfp4Codes block{.codes = 0, .scale = static_cast<uint8_t>(scale)};
  const float inverse = QuickInverse(divisor);
#pragma unroll
  for (int d = 0; d < kCount; ++d) {
    const uint32_t sign = __float_as_uint(x[d]) >> 28 & 0x8u;
    block.codes |= (MagnitudeCode(QuickQuotient(x[d], divisor, inverse)) | sign) << 4 * d;
  }
  return block;
}

}  // namespace tributary::cuda
