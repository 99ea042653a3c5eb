// One element of a tensor whose type is known only at run time. For the reference, for tails and
// for tests: loops that matter choose their type once, outside.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/dtype.h"
#include "kernels/float4.h"
#include "kernels/float8.h"
#include "kernels/half.h"

namespace tributary {

// Element `index` of `data`, exactly; of NVFP4 without its scales.
inline float LoadElement(DType type, const void* data, size_t index) {
  const auto* bytes =
      static_cast<const unsigned char*>(data) + index * static_cast<size_t>(BitsOf(type)) / 8;
  uint16_t half = 0;
  float single = 0;
  switch (type) {
    case DType::kF32:
      std::memcpy(&single, bytes, sizeof(single));
      return single;
    case DType::kBf16:
      std::memcpy(&half, bytes, sizeof(half));
      return FloatFromBf16(half);
    case DType::kF16:
      std::memcpy(&half, bytes, sizeof(half));
      return FloatFromF16(half);
    case DType::kFp8E4M3:
      return FloatFromFloat8E4M3(*bytes);
    case DType::kFp8E5M2:
      return FloatFromFloat8E5M2(*bytes);
    case DType::kNvfp4:
      return FloatFromFloat4E2M1(index % 2 == 0 ? *bytes & 0xfu : *bytes >> 4);
  }
  return std::numeric_limits<float>::quiet_NaN();
}

// Rounds to nearest even; FP8 and e2m1 saturate, the 16-bit types overflow to infinity.
inline void StoreElement(DType type, void* data, size_t index, float value) {
  auto* bytes = static_cast<unsigned char*>(data) + index * static_cast<size_t>(BitsOf(type)) / 8;
  uint16_t half = 0;
  switch (type) {
    case DType::kF32:
      std::memcpy(bytes, &value, sizeof(value));
      return;
    case DType::kBf16:
      half = Bf16FromFloat(value);
      std::memcpy(bytes, &half, sizeof(half));
      return;
    case DType::kF16:
      half = F16FromFloat(value);
      std::memcpy(bytes, &half, sizeof(half));
      return;
    case DType::kFp8E4M3:
      *bytes = Float8E4M3FromFloat(value);
      return;
    case DType::kFp8E5M2:
      *bytes = Float8E5M2FromFloat(value);
      return;
    case DType::kNvfp4:
      *bytes = static_cast<unsigned char>(
          index % 2 == 0 ? (*bytes & 0xf0u) | Float4E2M1FromFloat(value)
                         : (*bytes & 0x0fu) | uint32_t{Float4E2M1FromFloat(value)} << 4);
      return;
  }
}

}  // namespace tributary
