// Warpgroup products (sm_90a) with operand A in registers for an FP8 cache: queries in e4m3 times
// keys as they lie in the cache.
#pragma once

#include <cstdint>

#include "kernels/cuda/layout/page_layout.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// The sums of two pairs of f16.
__device__ __forceinline__ uint32_t AddPairs(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Of a tile of K: rows of 64 bytes, 64 tokens of the first 64 dimensions and then of the others, if
// there are any, as panels lie in the cache (page_layout.h). (PTX ISA, "matrix descriptor": 64-byte
// swizzle, eight rows 512 bytes after the eight before.)
__device__ __forceinline__ uint64_t KeyDescriptor(uint32_t keys) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kKeyPanelBytes >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // not used with a swizzle
  return kSwizzle64 | kEightRows | kLeading | (keys >> 4);
}
// The same from dimension 32 * step on.
__device__ __forceinline__ uint64_t KeyDescriptorOfStep(uint64_t keys, int step) {
  return keys + (step / 2 * (64 * kKeyPanelBytes) + step % 2 * 32 >> 4);
}

#define TRIBUTARY_F8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// D[64 x 64] (+)= A[64 x 32] B[32 x 64], A in e4m3 in registers and B in kKv.
#define TRIBUTARY_WGMMA_FP8(types)                                                        \
  asm volatile(                                                                           \
      "{ .reg .pred accumulate;\n"                                                        \
      "  setp.ne.b32 accumulate, %37, 0;\n"                                               \
      "  wgmma.mma_async.sync.aligned.m64n64k32.f32." types                               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1; }"                                    \
      : TRIBUTARY_F8(0), TRIBUTARY_F8(8), TRIBUTARY_F8(16), TRIBUTARY_F8(24)              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
template <DType kKv>
__device__ __forceinline__ void WgmmaFp8(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  if constexpr (kKv == DType::kFp8E4M3)
    TRIBUTARY_WGMMA_FP8("e4m3.e4m3");
  else
    TRIBUTARY_WGMMA_FP8("e4m3.e5m2");
}
#undef TRIBUTARY_WGMMA_FP8

#undef TRIBUTARY_F8

}  // namespace tributary::cuda
