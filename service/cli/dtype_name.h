// Element types by the names that flags and docs have for them.
#pragma once

#include <string>

#include "absl/strings/ascii.h"
#include "tributary/v1/types.pb.h"

namespace tributary::cli {

// "fp8_e4m3" of DTYPE_FP8_E4M3.
inline std::string DTypeName(v1::DType dtype) {
  constexpr size_t kPrefix = sizeof("DTYPE_") - 1;
  return absl::AsciiStrToLower(v1::DType_Name(dtype).substr(kPrefix));
}

}  // namespace tributary::cli
