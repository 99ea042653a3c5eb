// How an output of FP8 or NVFP4 must look, from the words of the proto alone: the nearest number is
// looked for among all there are, in double, apart from the code under test.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/output_format.h"

namespace tributary::test {

// A format's finite magnitudes in the order of their codes.
inline std::vector<double> Magnitudes(int exponent_bits, int mantissa_bits, int finite_codes) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> all;
  for (int code = 0; code < finite_codes; ++code) {
    const int exponent = code >> mantissa_bits;
    const double mantissa = static_cast<double>(code & ((1 << mantissa_bits) - 1)) /
                            static_cast<double>(1 << mantissa_bits);
    all.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias)
                                : std::ldexp(1 + mantissa, exponent - bias));
  }
  return all;
}

inline const std::vector<double>& E4M3Magnitudes() {
  static const std::vector<double> all = Magnitudes(4, 3, 127);  // up to 448
  return all;
}
inline const std::vector<double>& E2M1Magnitudes() {
  static const std::vector<double> all = Magnitudes(2, 1, 8);  // up to 6
  return all;
}

// The code of the nearest magnitude; of two as near, the even one.
inline uint8_t NearestCode(const std::vector<double>& magnitudes, double x) {
  size_t best = 0;
  for (size_t code = 1; code < magnitudes.size(); ++code) {
    const double error = std::abs(std::abs(x) - magnitudes[code]);
    const double least = std::abs(std::abs(x) - magnitudes[best]);
    if (error < least || (error == least && code % 2 == 0)) best = code;
  }
  if (std::abs(x) >= magnitudes.back()) best = magnitudes.size() - 1;
  return static_cast<uint8_t>(best);
}

// The bytes of `values` in a format. NaN is left to tests of its own.
inline std::vector<uint8_t> QuantizedOutput(const OutputFormat& format,
                                            std::span<const float> values) {
  std::vector<uint8_t> bytes(OutputBytes(format.dtype, static_cast<int64_t>(values.size())));
  if (format.dtype == DType::kFp8E4M3) {
    for (size_t i = 0; i < values.size(); ++i) {
      const float x = values[i] / format.scale;
      bytes[i] = NearestCode(E4M3Magnitudes(), x) | (std::signbit(x) ? 0x80 : 0);
    }
    return bytes;
  }
  for (size_t block = 0; block < values.size() / 16; ++block) {
    const std::span<const float> x = values.subspan(block * 16, 16);
    float largest = 0;
    for (const float value : x) largest = std::fmax(largest, std::abs(value));
    const uint8_t scale = NearestCode(E4M3Magnitudes(), largest / (6.0f * format.scale));
    bytes[values.size() / 2 + block] = scale;
    const float divisor = static_cast<float>(E4M3Magnitudes()[scale]) * format.scale;
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t magnitude = scale == 0 ? 0 : NearestCode(E2M1Magnitudes(), x[i] / divisor);
      const int code = magnitude | (std::signbit(x[i]) ? 8 : 0);
      bytes[block * 8 + i / 2] |= static_cast<uint8_t>(code << (i % 2 * 4));
    }
  }
  return bytes;
}

}  // namespace tributary::test
