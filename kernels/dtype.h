// Element types of tensors and of the KV cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tributary {

enum class DType : uint8_t {
  kF32 = 0,
  kBf16 = 1,
  kF16 = 2,
  kFp8E4M3 = 3,  // OCP e4m3fn: no infinities, NaN = S.1111.111, largest finite 448
  kFp8E5M2 = 4,  // OCP e5m2: infinities as in IEEE, largest finite 57344
  kNvfp4 = 5,    // e2m1 elements; each 16 share an e4m3 scale that lies elsewhere (nvfp4.h)
};

// Bits of one element.
constexpr int32_t BitsOf(DType t) {
  switch (t) {
    case DType::kF32:
      return 32;
    case DType::kBf16:
    case DType::kF16:
      return 16;
    case DType::kFp8E4M3:
    case DType::kFp8E5M2:
      return 8;
    case DType::kNvfp4:
      return 4;
  }
  return 0;
}

// Bytes of so many consecutive elements, the last byte counted whole.
constexpr size_t BytesOf(DType t, int64_t elements) {
  return (static_cast<size_t>(elements) * static_cast<size_t>(BitsOf(t)) + 7) / 8;
}

// Consecutive elements of NVFP4 that share a scale.
inline constexpr int32_t kNvfp4Block = 16;

// Bytes of the block scales that so many consecutive elements (whole blocks) bring with them; 0 for
// types other than NVFP4.
constexpr size_t BlockScaleBytes(DType t, int64_t elements) {
  return t == DType::kNvfp4 ? static_cast<size_t>(elements / kNvfp4Block) : 0;
}

// Bytes of one element. Only for kernels that are built for types of whole bytes.
constexpr size_t SizeOf(DType t) { return BytesOf(t, 1); }

// Whether an element is a number by itself, as in the tensors that callers hand over: f32, bf16,
// f16.
constexpr bool IsUnscaled(DType t) {
  return t == DType::kF32 || t == DType::kBf16 || t == DType::kF16;
}

constexpr bool IsFp8(DType t) { return t == DType::kFp8E4M3 || t == DType::kFp8E5M2; }

// The name users write in flags, protos and metrics: "f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2",
// "nvfp4".
constexpr const char* Name(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kFp8E4M3:
      return "fp8_e4m3";
    case DType::kFp8E5M2:
      return "fp8_e5m2";
    case DType::kNvfp4:
      return "nvfp4";
  }
  return "unknown";
}

}  // namespace tributary
