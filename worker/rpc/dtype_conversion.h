// Element types on the wire and in memory.
#pragma once

#include <optional>

#include "kernels/dtype.h"
#include "tributary/v1/types.pb.h"

namespace tributary {

inline v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kFp8E4M3:
      return v1::DTYPE_FP8_E4M3;
    case DType::kFp8E5M2:
      return v1::DTYPE_FP8_E5M2;
    case DType::kNvfp4:
      return v1::DTYPE_NVFP4;
  }
  return v1::DTYPE_UNSPECIFIED;
}

// Nothing for DTYPE_UNSPECIFIED and for values of a newer version.
inline std::optional<DType> FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return DType::kF32;
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_F16:
      return DType::kF16;
    case v1::DTYPE_FP8_E4M3:
      return DType::kFp8E4M3;
    case v1::DTYPE_FP8_E5M2:
      return DType::kFp8E5M2;
    case v1::DTYPE_NVFP4:
      return DType::kNvfp4;
    default:
      return std::nullopt;
  }
}

}  // namespace tributary
