// From float to stored elements, with the same bits as kernels/float8.h and kernels/half.h give.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/float8.h"
#include "kernels/half.h"

namespace tributary::cuda {

// The bits of one element, low in the result.
template <DType kType>
__device__ __forceinline__ uint32_t Encode(float x) {
  if constexpr (kType == DType::kF32) return __float_as_uint(x);
  if constexpr (kType == DType::kBf16) return Bf16FromFloat(x);
  if constexpr (kType == DType::kF16) return F16FromFloat(x);
#if __CUDA_ARCH__ >= 890
  constexpr auto kFormat = kType == DType::kFp8E4M3 ? __NV_E4M3 : __NV_E5M2;
  constexpr uint32_t kNan =
      kType == DType::kFp8E4M3 ? Float8E4M3Format::kNan : Float8E5M2Format::kNan;
  const uint32_t number = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kFormat);
  return x == x ? number : (__float_as_uint(x) >> 24 & 0x80u) | kNan;
#else
  return kType == DType::kFp8E4M3 ? Float8E4M3FromFloat(x) : Float8E5M2FromFloat(x);
#endif
}

// Two floats rounded to e4m3; `low` in the low byte. A NaN may lose its sign.
__device__ __forceinline__ uint32_t PackE4M3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
#else
  return Encode<DType::kFp8E4M3>(low) | Encode<DType::kFp8E4M3>(high) << 8;
#endif
}

// The e4m3 number in the low byte.
__device__ __forceinline__ float WidenE4M3(uint32_t stored) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(stored)));
  return __half2float(__ushort_as_half(static_cast<uint16_t>(halves)));
#else
  return FloatFromFloat8E4M3(static_cast<uint8_t>(stored));
#endif
}

// kCount elements packed into words, lowest first.
template <DType kType, int kCount>
__device__ __forceinline__ void EncodeWords(const float (&x)[kCount],
                                            uint32_t (&words)[kCount * SizeOf(kType) / 4]) {
  constexpr int kOfWord = 4 / int(SizeOf(kType));
#pragma unroll
  for (int w = 0; w < kCount / kOfWord; ++w) {
    words[w] = 0;
#pragma unroll
    for (int i = 0; i < kOfWord; ++i) {
      words[w] |= Encode<kType>(x[w * kOfWord + i]) << (i * 8 * int(SizeOf(kType)) % 32);
    }
  }
}

}  // namespace tributary::cuda
