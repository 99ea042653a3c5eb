// NVFP4: 16 consecutive numbers share a scale.
//
//   number = e2m1 element * e4m3 scale of its block of 16 * f32 scale of the tensor
//
// Quantising takes a block's largest magnitude m and the tensor's scale t. All of it is float
// arithmetic, each operation rounded to nearest even, so that every machine gives the same bytes:
//
//   block scale  s = e4m3(m / (6 t))
//   element      e2m1(x / (s t)), and zero of x's sign where s is 0 or NaN
//
// Both roundings are to nearest even and saturate. A NaN makes its block's scale NaN, so that it is
// seen in all numbers of the block.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/dtype.h"
#include "kernels/float4.h"
#include "kernels/float8.h"

namespace tributary {

// What is the larger of two magnitudes when it is the larger of these; NaN is larger than any
// number.
TRIBUTARY_HOST_DEVICE constexpr uint32_t MagnitudeBits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

// The e4m3 scale of a block whose largest MagnitudeBits are these.
TRIBUTARY_HOST_DEVICE constexpr uint8_t Nvfp4BlockScale(uint32_t largest, float tensor_scale) {
  // Machines differ in the sign of a NaN that they make.
  return Float8E4M3FromFloat(std::bit_cast<float>(largest) / (6.0f * tensor_scale)) & 0x7fu;
}

// What a block's numbers are divided by to give its elements.
TRIBUTARY_HOST_DEVICE constexpr float Nvfp4Divisor(uint8_t block_scale, float tensor_scale) {
  if (block_scale == 0) return std::numeric_limits<float>::infinity();
  return FloatFromFloat8E4M3(block_scale) * tensor_scale;
}

TRIBUTARY_HOST_DEVICE constexpr uint8_t Nvfp4Element(float x, float divisor) {
  const uint32_t sign = std::bit_cast<uint32_t>(x) >> 28 & 0x8u;
  return static_cast<uint8_t>((Float4E2M1FromFloat(x / divisor) & 0x7u) | sign);
}

}  // namespace tributary
