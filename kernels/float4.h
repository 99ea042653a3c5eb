// e2m1 (OCP 4-bit floating point): a sign, two bits of exponent and one of mantissa, so that a
// magnitude is 0, 0.5, 1, 1.5, 2, 3, 4 or 6. It has neither infinities nor NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/float8.h"

namespace tributary {

// As the formats of float8.h, so that the conversion is theirs. What is no number becomes zero.
struct Float4E2M1Format {
  static constexpr int kMantissaBits = 1;
  static constexpr int kBias = 1;
  static constexpr float kMax = 6.0f;
  static constexpr uint8_t kMaxBits = 0x7;
  static constexpr uint8_t kNan = 0x0;
};

// A code in the four low bits, its sign in bit 3. Rounds to nearest even and saturates.
TRIBUTARY_HOST_DEVICE constexpr uint8_t Float4E2M1FromFloat(float f) {
  const uint8_t wide = Float8FromFloat<Float4E2M1Format>(f);  // its sign in bit 7
  return static_cast<uint8_t>((wide & 0x7u) | (wide >> 4 & 0x8u));
}

TRIBUTARY_HOST_DEVICE constexpr float FloatFromFloat4E2M1(uint8_t code) {
  const uint32_t sign = uint32_t{code} >> 3 << 31;
  // A float whose exponent is 126 too small, then an exact multiplication.
  const float magnitude = std::bit_cast<float>((code & 0x7u) << 22) * 0x1p126f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

}  // namespace tributary
