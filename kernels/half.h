// bf16 and f16 (IEEE binary16) to and from float, exact one way and nearest-even the other.
//
// Written on bits, so that host and device, and every compiler flag, give the same answer. Both
// formats overflow to infinity as IEEE 754 does, keep subnormals, and turn any NaN into a quiet NaN
// of the same sign.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary {

TRIBUTARY_HOST_DEVICE constexpr float FloatFromBf16(uint16_t h) {
  return std::bit_cast<float>(uint32_t{h} << 16);
}

TRIBUTARY_HOST_DEVICE constexpr uint16_t Bf16FromFloat(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

TRIBUTARY_HOST_DEVICE constexpr float FloatFromF16(uint16_t h) {
  const uint32_t sign = uint32_t{h} >> 15 << 31;
  const uint32_t magnitude = h & 0x7fffu;
  // Moves exponent and mantissa into a float whose exponent is 112 too small, then multiplies by
  // 2^112: exact for normals and subnormals alike.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  uint32_t bits = std::bit_cast<uint32_t>(scaled);
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  if (magnitude > 0x7c00u) bits |= 0x400000u;  // quiet
  return std::bit_cast<float>(bits | sign);
}

TRIBUTARY_HOST_DEVICE constexpr uint16_t F16FromFloat(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 2^16
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
    // 0.5 has a unit in the last place of 2^-24, so this addition does the rounding.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace tributary
