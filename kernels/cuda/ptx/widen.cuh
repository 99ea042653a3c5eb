// From cache elements to the operands of a product: FP8 becomes f16 in registers, exactly.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/dtype.h"

namespace tributary::cuda {

// The type in which products with a cache of this type are computed.
constexpr DType ComputeType(DType kv) { return kv == DType::kBf16 ? DType::kBf16 : DType::kF16; }

// What an operand that was widened is multiplied by to be the element; see widen_nvfp4.cuh.
constexpr float ElementUnit(DType kv) { return kv == DType::kNvfp4 ? 0x1p14f : 1.0f; }

// Two e4m3 values: the half of `word` that kHigh names.
template <bool kHigh>
__device__ __forceinline__ uint32_t WidenE4M3(uint32_t word) {
#if __CUDA_ARCH__ >= 890
  uint32_t y;
  if constexpr (kHigh) {
    asm("{ .reg .b16 low, high;\n"
        "  mov.b32 {low, high}, %1;\n"
        "  cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(y)
        : "r"(word));
  } else {
    asm("{ .reg .b16 low, high;\n"
        "  mov.b32 {low, high}, %1;\n"
        "  cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(y)
        : "r"(word));
  }
  return y;
#else
  // Exponent and mantissa move into an f16 whose exponent is 8 too small; multiplying by 2^8 is
  // exact, for subnormals too. S.1111.111 is NaN, not 480.
  const uint32_t bytes =
      __byte_perm(word, 0, kHigh ? 0x3424 : 0x1404);  // each byte in the high half of a lane
  const uint32_t magnitude = (bytes & 0x7f007f00u) >> 1;
  const uint32_t bits = magnitude | (bytes & 0x80008000u);
  const __half2 scaled =
      __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.0f));
  const uint32_t nan = __vcmpeq2(magnitude, 0x3f803f80u);
  return *reinterpret_cast<const uint32_t*>(&scaled) | nan;
#endif
}

// Two e5m2 values, likewise: the high byte of an f16 is an e5m2.
template <bool kHigh>
__device__ __forceinline__ uint32_t WidenE5M2(uint32_t word) {
  return __byte_perm(word, 0, kHigh ? 0x3424 : 0x1404);
}

// Four neighbouring elements of a 16-byte vector as two registers of two compute-type elements.
// `quad` counts fours of elements: 0..3 for 8-bit types, 0..1 for 16-bit ones.
template <DType kKv>
__device__ __forceinline__ void WidenQuad(const uint4& vector, int quad, uint32_t& low,
                                          uint32_t& high) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  if constexpr (kKv == DType::kFp8E4M3) {
    low = WidenE4M3<false>(words[quad]);
    high = WidenE4M3<true>(words[quad]);
  } else if constexpr (kKv == DType::kFp8E5M2) {
    low = WidenE5M2<false>(words[quad]);
    high = WidenE5M2<true>(words[quad]);
  } else {
    low = words[2 * quad];
    high = words[2 * quad + 1];
  }
}

// Clears, in words of V (quads of tokens, a dimension after the other), the tokens whose bit in
// `alive` is 0.
template <DType kKv, int kWords>
__device__ __forceinline__ void KeepTokens(uint32_t (&words)[kWords], uint32_t alive) {
  uint32_t masks[2];
  if constexpr (SizeOf(kKv) == 1) {
    masks[0] = (alive & 1 ? 0x000000ffu : 0u) | (alive & 2 ? 0x0000ff00u : 0u) |
               (alive & 4 ? 0x00ff0000u : 0u) | (alive & 8 ? 0xff000000u : 0u);
    masks[1] = masks[0];
  } else {
    masks[0] = (alive & 1 ? 0x0000ffffu : 0u) | (alive & 2 ? 0xffff0000u : 0u);
    masks[1] = (alive & 4 ? 0x0000ffffu : 0u) | (alive & 8 ? 0xffff0000u : 0u);
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] &= masks[w % 2];
}
template <DType kKv>
__device__ __forceinline__ void KeepTokens(uint4& vector, uint32_t alive) {
  uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  KeepTokens<kKv>(words, alive);
  vector = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace tributary::cuda
