// Elements of new tokens, as the kernels read them that encode one after the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/half.h"

namespace tributary::cuda {

inline constexpr int kTokenDims = 8;  // of a thread

__device__ __forceinline__ void LoadDims(DType type, const void* data, size_t element,
                                         float (&x)[kTokenDims]) {
  if (type == DType::kF32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + element);
    const float4 low = __ldcs(from);
    const float4 high = __ldcs(from + 1);
    const float all[kTokenDims] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kTokenDims; ++i) x[i] = all[i];
    return;
  }
  const uint4 v =
      __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + element));
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kTokenDims; ++i) {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    x[i] = type == DType::kBf16 ? FloatFromBf16(bits) : FloatFromF16(bits);
  }
}

__device__ __forceinline__ void Unscale(const float* scales, int head, float (&x)[kTokenDims]) {
  if (scales == nullptr) return;
  const float scale = __ldg(scales + head);
#pragma unroll
  for (int i = 0; i < kTokenDims; ++i) {
    if (x[i] == x[i]) x[i] = __fdiv_rn(x[i], scale);  // a NaN keeps its bits
  }
}

}  // namespace tributary::cuda
