// Queries rounded to FP8, as backends do on request where they meet an FP8 cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/element.h"
#include "kernels/float8.h"

namespace tributary {

// The exponent of the power of two that brings the largest of a query's elements just below 2^8, so
// that e4m3, whose largest number is 448, holds it. Rounding is the same with any scale but for the
// smallest elements, so this one, which multiplies exactly, is as good as one that fills the range.
inline int Fp8QueryExponent(float largest) {
  int exponent = 0;
  if (largest > 0.0f && std::isfinite(largest)) std::frexp(largest, &exponent);
  return std::min(8 - exponent, 126);
}

// queries: [.., head_dim] of `type` (f32, bf16 or f16). Each is rounded to e4m3 with a scale of its
// own, and becomes f32 again in rounded[.., head_dim]. With an infinite element all of it is NaN.
inline void RoundQueriesToFp8(DType type, int32_t head_dim, std::span<const std::byte> queries,
                              float* rounded) {
  const size_t elements = queries.size() * 8 / size_t(BitsOf(type));
  const auto dim = static_cast<size_t>(head_dim);
  for (size_t begin = 0; begin < elements; begin += dim) {
    float largest = 0.0f;
    for (size_t i = begin; i < begin + dim; ++i) {
      rounded[i] = LoadElement(type, queries.data(), i);
      largest = std::max(largest, std::abs(rounded[i]));
    }
    const int exponent = Fp8QueryExponent(largest);
    for (size_t i = begin; i < begin + dim; ++i) {
      const float scaled = std::isinf(largest) ? NAN : std::ldexp(rounded[i], exponent);
      rounded[i] = std::ldexp(FloatFromFloat8E4M3(Float8E4M3FromFloat(scaled)), -exponent);
    }
  }
}

}  // namespace tributary
