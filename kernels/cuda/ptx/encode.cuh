// From float to stored elements, with the same bits as kernels/float8.h and kernels/half.h give.
#pragma once

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
  if (x == x) {
    constexpr auto kFormat = kType == DType::kFp8E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kFormat);
  }
#endif
  return kType == DType::kFp8E4M3 ? Float8E4M3FromFloat(x) : Float8E5M2FromFloat(x);
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
