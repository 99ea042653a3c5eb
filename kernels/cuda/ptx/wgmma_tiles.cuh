// Warpgroup products for tiles of query rows (sm_90a): D[64 x N] += A[64 x 16] B[16 x N] with A in
// shared memory or in registers, and B in shared memory with either index contiguous.
//
// Tiles are what the copy engine writes with swizzle: panels of consecutive rows, 128 bytes wide
// (or 64, when a row has no more), 16-byte chunks exchanged within every eight rows, aligned to
// 1024 bytes.
#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/dtype.h"

namespace tributary::cuda {

inline constexpr int kStepBytes = 32;  // of a row, that one product sums over

// Operand A or B whose rows are the index that is not summed over (queries, keys), from byte
// kStepBytes * step of the panel's rows on (PTX ISA, "matrix descriptor", K-major).
template <int kRowBytes>
__device__ __forceinline__ uint64_t RowMajorDescriptor(uint32_t panel, int step) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kRowBytes >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // not used with a swizzle
  return kSwizzle | kEightRows | kLeading | ((panel + step * kStepBytes) >> 4 & 0x3fff);
}

// Operand B whose rows are summed over (values), in panels of kRowBytes: rows
// [16 * step, 16 * step + 16) of panels that are `panel_bytes` apart (MN-major).
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t ColumnMajorDescriptor(uint32_t panel, int step,
                                                          uint32_t panel_bytes) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kRowBytes >> 4} << 32;
  return kSwizzle | kEightRows | uint64_t{panel_bytes >> 4} << 16 |
         ((panel + step * 16 * kRowBytes) >> 4 & 0x3fff);
}

// Waits for all but the last kPending groups of products.
template <int kPending>
__device__ __forceinline__ void WgmmaWaitFor() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define TRIBUTARY_F8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TRIBUTARY_F32S(i) \
  TRIBUTARY_F8(i), TRIBUTARY_F8(i + 8), TRIBUTARY_F8(i + 16), TRIBUTARY_F8(i + 24)
#define TRIBUTARY_D32                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define TRIBUTARY_D64                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31," \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47," \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define TRIBUTARY_D40                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39}"
#define TRIBUTARY_D48                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define TRIBUTARY_D96                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"

// `types` as in "k16.f32.bf16.bf16", `tail` the immediates after the predicate.
#define TRIBUTARY_SHARED_64(types, tail)                              \
  asm volatile(                                                       \
      "{ .reg .pred accumulate;\n"                                    \
      "  setp.ne.b32 accumulate, %34, 0;\n"                           \
      "  wgmma.mma_async.sync.aligned.m64n64" types " " TRIBUTARY_D32 \
      ", %32, %33, accumulate, " tail "; }"                           \
      : TRIBUTARY_F32S(0)                                             \
      : "l"(a), "l"(b), "n"(kAccumulate))
#define TRIBUTARY_SHARED_128(types, tail)                              \
  asm volatile(                                                        \
      "{ .reg .pred accumulate;\n"                                     \
      "  setp.ne.b32 accumulate, %66, 0;\n"                            \
      "  wgmma.mma_async.sync.aligned.m64n128" types " " TRIBUTARY_D64 \
      ", %64, %65, accumulate, " tail "; }"                            \
      : TRIBUTARY_F32S(0), TRIBUTARY_F32S(32)                          \
      : "l"(a), "l"(b), "n"(kAccumulate))
// Queries in e4m3 and keys in any type of eight bits; or both in the same type of sixteen.
#define TRIBUTARY_SHARED(size)                                  \
  if constexpr (kType == DType::kBf16) {                        \
    TRIBUTARY_SHARED_##size("k16.f32.bf16.bf16", "1, 1, 0, 0"); \
  } else if constexpr (kType == DType::kF16) {                  \
    TRIBUTARY_SHARED_##size("k16.f32.f16.f16", "1, 1, 0, 0");   \
  } else if constexpr (kType == DType::kFp8E4M3) {              \
    TRIBUTARY_SHARED_##size("k32.f32.e4m3.e4m3", "1, 1");       \
  } else {                                                      \
    TRIBUTARY_SHARED_##size("k32.f32.e4m3.e5m2", "1, 1");       \
  }
// `summed`: the immediate that says whether the rows of B are summed over, where there is one.
#define TRIBUTARY_REGISTERS_64(types, summed)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64" types " " TRIBUTARY_D32 \
               ", {%32, %33, %34, %35}, %36, 1, 1, 1" summed ";"             \
               : TRIBUTARY_F32S(0)                                           \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kRowsSummed))
#define TRIBUTARY_REGISTERS_80(types, summed)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n80" types " " TRIBUTARY_D40 \
               ", {%40, %41, %42, %43}, %44, 1, 1, 1" summed ";"             \
               : TRIBUTARY_F32S(0), TRIBUTARY_F8(32)                         \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kRowsSummed))
#define TRIBUTARY_REGISTERS_96(types, summed)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n96" types " " TRIBUTARY_D48 \
               ", {%48, %49, %50, %51}, %52, 1, 1, 1" summed ";"             \
               : TRIBUTARY_F32S(0), TRIBUTARY_F8(32), TRIBUTARY_F8(40)       \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kRowsSummed))
#define TRIBUTARY_REGISTERS_128(types, summed)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128" types " " TRIBUTARY_D64 \
               ", {%64, %65, %66, %67}, %68, 1, 1, 1" summed ";"              \
               : TRIBUTARY_F32S(0), TRIBUTARY_F32S(32)                        \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kRowsSummed))
#define TRIBUTARY_REGISTERS_192(types, summed)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n192" types " " TRIBUTARY_D96 \
               ", {%96, %97, %98, %99}, %100, 1, 1, 1" summed ";"             \
               : TRIBUTARY_F32S(0), TRIBUTARY_F32S(32), TRIBUTARY_F32S(64)    \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kRowsSummed))
// Weights in e4m3 and values in any type of eight bits, whose rows are not summed over; or both in
// the same type of sixteen.
#define TRIBUTARY_REGISTERS(size, summed)                         \
  if constexpr (kValues == DType::kBf16) {                        \
    TRIBUTARY_REGISTERS_##size("k16.f32.bf16.bf16", ", " summed); \
  } else if constexpr (kValues == DType::kF16) {                  \
    TRIBUTARY_REGISTERS_##size("k16.f32.f16.f16", ", " summed);   \
  } else if constexpr (kValues == DType::kFp8E4M3) {              \
    TRIBUTARY_REGISTERS_##size("k32.f32.e4m3.e4m3", "");          \
  } else {                                                        \
    TRIBUTARY_REGISTERS_##size("k32.f32.e4m3.e5m2", "");          \
  }

// D (+)= A B with both operands' rows not summed over, kStepBytes of each.
template <DType kType, bool kAccumulate>
__device__ __forceinline__ void WgmmaShared(float (&d)[32], uint64_t a, uint64_t b) {
  TRIBUTARY_SHARED(64)
}
template <DType kType, bool kAccumulate>
__device__ __forceinline__ void WgmmaShared(float (&d)[64], uint64_t a, uint64_t b) {
  TRIBUTARY_SHARED(128)
}

// D += A B with A in registers: kStepBytes of each of its rows. In sixteen bits the rows of B are
// summed over or not; in eight they are not.
template <DType kValues, bool kRowsSummed = SizeOf(kValues) == 2>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[32], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {
  TRIBUTARY_REGISTERS(64, "%37")
}
template <DType kValues, bool kRowsSummed = SizeOf(kValues) == 2>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[40], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {
  TRIBUTARY_REGISTERS(80, "%45")
}
template <DType kValues, bool kRowsSummed = SizeOf(kValues) == 2>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[48], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {
  TRIBUTARY_REGISTERS(96, "%53")
}
template <DType kValues, bool kRowsSummed = SizeOf(kValues) == 2>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[64], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {
  TRIBUTARY_REGISTERS(128, "%69")
}
template <DType kValues, bool kRowsSummed = SizeOf(kValues) == 2>
__device__ __forceinline__ void WgmmaRegisters(float (&d)[96], uint32_t a0, uint32_t a1,
                                               uint32_t a2, uint32_t a3, uint64_t b) {
  TRIBUTARY_REGISTERS(192, "%101")
}

#undef TRIBUTARY_F8
#undef TRIBUTARY_F32S
#undef TRIBUTARY_D32
#undef TRIBUTARY_D40
#undef TRIBUTARY_D48
#undef TRIBUTARY_D64
#undef TRIBUTARY_D96
#undef TRIBUTARY_SHARED
#undef TRIBUTARY_SHARED_64
#undef TRIBUTARY_SHARED_128
#undef TRIBUTARY_REGISTERS
#undef TRIBUTARY_REGISTERS_64
#undef TRIBUTARY_REGISTERS_80
#undef TRIBUTARY_REGISTERS_96
#undef TRIBUTARY_REGISTERS_128
#undef TRIBUTARY_REGISTERS_192

}  // namespace tributary::cuda
