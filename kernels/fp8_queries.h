// What queries become that are rounded to FP8, as kernels do on request: for those who compare with
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

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

// [heads, head_dim] queries of `type` (f32, bf16 or f16), each rounded to e4m3 with a scale of its
// own, in their own type again. With an infinite element all of a query is NaN.
inline std::vector<std::byte> RoundQueriesToFp8(DType type, int32_t head_dim,
                                                const std::vector<std::byte>& queries) {
  std::vector<std::byte> rounded(queries.size());
  const size_t elements = queries.size() / SizeOf(type);
  for (size_t begin = 0; begin < elements; begin += head_dim) {
    float largest = 0.0f;
    for (size_t i = begin; i < begin + head_dim; ++i) {
      largest = std::max(largest, std::abs(LoadElement(type, queries.data(), i)));
    }
    const int exponent = Fp8QueryExponent(largest);
    for (size_t i = begin; i < begin + head_dim; ++i) {
      float scaled = std::ldexp(LoadElement(type, queries.data(), i), exponent);
      if (std::isinf(largest)) scaled = std::nanf("");
      const float fp8 = FloatFromFloat8E4M3(Float8E4M3FromFloat(scaled));
      StoreElement(type, rounded.data(), i, std::ldexp(fp8, -exponent));
    }
  }
  return rounded;
}

}  // namespace tributary
