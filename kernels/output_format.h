// How attention's output is stored for a host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace tributary {

// f32, bf16, f16, fp8_e4m3 or nvfp4. An fp8_e4m3 element is the number divided by `scale`, rounded
// to nearest even, saturated; of nvfp4 `scale` is the tensor's (kernels/nvfp4.h). The others have
// no scale, whatever is said here.
struct OutputFormat {
  DType dtype = DType::kF32;
  float scale = 1.0f;
};

constexpr bool IsOutputType(DType t) {
  return IsUnscaled(t) || t == DType::kFp8E4M3 || t == DType::kNvfp4;
}

// Where the block scales of an NVFP4 output of so many elements (whole blocks) begin: behind all
// elements, which lie two to a byte, the first of them in the low bits.
constexpr size_t Nvfp4ScalesOffset(int64_t elements) { return BytesOf(DType::kNvfp4, elements); }

// Bytes of an output of so many elements, scales included.
constexpr size_t OutputBytes(DType t, int64_t elements) {
  return BytesOf(t, elements) + BlockScaleBytes(t, elements);
}

}  // namespace tributary
