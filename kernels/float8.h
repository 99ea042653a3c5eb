// FP8 e4m3fn and e5m2 (OCP 8-bit floating point, revision 1.0) to and from float.
//
// Decoding is exact. Encoding rounds to nearest even and saturates: what is too large, infinities
// included, becomes the largest finite value, because one outlier must not turn a row of attention
// into NaN. NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary {

// What both formats need to know about themselves; the conversions are one algorithm.
struct Float8E4M3Format {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint8_t kMaxBits = 0x7e;
  static constexpr uint8_t kNan = 0x7f;
};
struct Float8E5M2Format {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint8_t kMaxBits = 0x7b;
  static constexpr uint8_t kNan = 0x7e;
};

template <typename Format>
TRIBUTARY_HOST_DEVICE constexpr uint8_t Float8FromFloat(float f) {
  constexpr int kDropped = 23 - Format::kMantissaBits;
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Format::kBias) << 23;
  // A power of two whose unit in the last place is the format's smallest subnormal.
  constexpr uint32_t kSubnormalMagic = uint32_t(127 + 1 - Format::kBias + kDropped) << 23;

  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | Format::kNan;
  if (magnitude >= std::bit_cast<uint32_t>(Format::kMax)) return sign | Format::kMaxBits;
  if (magnitude < kSmallestNormal) {
    const float rounded = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kSubnormalMagic);
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(rounded) - kSubnormalMagic);
  }
  const uint32_t half = (1u << (kDropped - 1)) - 1u;
  const uint32_t rounded = magnitude + half + (magnitude >> kDropped & 1u);
  constexpr uint32_t kRebias = uint32_t(127 - Format::kBias) << Format::kMantissaBits;
  return sign | static_cast<uint8_t>((rounded >> kDropped) - kRebias);
}

TRIBUTARY_HOST_DEVICE constexpr uint8_t Float8E4M3FromFloat(float f) {
  return Float8FromFloat<Float8E4M3Format>(f);
}
TRIBUTARY_HOST_DEVICE constexpr uint8_t Float8E5M2FromFloat(float f) {
  return Float8FromFloat<Float8E5M2Format>(f);
}

TRIBUTARY_HOST_DEVICE constexpr float FloatFromFloat8E4M3(uint8_t b) {
  const uint32_t sign = uint32_t{b} >> 7 << 31;
  const uint32_t magnitude = b & 0x7fu;
  // As in FloatFromF16: a float whose exponent is 120 too small, then an exact multiplication.
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
  if (magnitude == 0x7fu) bits = 0x7fc00000u;
  return std::bit_cast<float>(bits | sign);
}

TRIBUTARY_HOST_DEVICE constexpr float FloatFromFloat8E5M2(uint8_t b) {
  const uint32_t sign = uint32_t{b} >> 7 << 31;
  const uint32_t magnitude = b & 0x7fu;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 21) * 0x1p112f);
  if (magnitude >= 0x7cu) bits = magnitude == 0x7cu ? 0x7f800000u : 0x7fc00000u;
  return std::bit_cast<float>(bits | sign);
}

}  // namespace tributary
