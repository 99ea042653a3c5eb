// Hopper's warpgroup product (sm_90a): D[64 x N] += A[64 x 16] B[16 x N], A in registers, B in
// shared memory, D in fp32 registers.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace tributary::cuda {

// A tile of B: N rows (columns of the product) of 64 contraction slots, 128 bytes each, 16-byte
// chunks exchanged by kSwizzle within every 8 rows, aligned to 1024 bytes.
inline constexpr int kTileSlots = 64;
inline constexpr int kTileRowBytes = 128;

// Byte offset of a 16-byte chunk of a row.
__device__ __forceinline__ int SwizzledChunk(int row, int chunk) {
  return row * kTileRowBytes + ((chunk ^ (row & 7)) << 4);
}

// The descriptor of a tile (PTX ISA, "matrix descriptor"): 128-byte swizzle, groups of eight rows
// 1024 bytes apart.
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kLeading = uint64_t{1} << 16;  // not used with this swizzle
  return kSwizzle128 | kStride | kLeading | (shared_address >> 4);
}
// The same from contraction slot 16 * step on.
__device__ __forceinline__ uint64_t DescriptorOfStep(uint64_t tile, int step) {
  return tile + step * (32 >> 4);
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all products begun.
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps the compiler from moving what computes or reads registers of products across this point:
// between a product's issue and its end, it would have to run the products one by one.
template <int kCount>
__device__ __forceinline__ void FenceRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void FenceRegisters(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

template <typename Element, int kRows, int kCount>
__device__ __forceinline__ void FenceRegisters(Element (&x)[kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) FenceRegisters(x[i]);
}
template <typename Element, int kPlanes, int kRows, int kCount>
__device__ __forceinline__ void FenceRegisters(Element (&x)[kPlanes][kRows][kCount]) {
#pragma unroll
  for (int i = 0; i < kPlanes; ++i) FenceRegisters(x[i]);
}

#define TRIBUTARY_WGMMA_32(type)                                                                \
  asm volatile(                                                                                 \
      "{ .reg .pred accumulate;\n"                                                              \
      "  setp.ne.b32 accumulate, %21, 0;\n"                                                     \
      "  wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                             \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "               \
      "{%16, %17, %18, %19}, %20, accumulate, 1, 1, 0; }"                                       \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))

#define TRIBUTARY_WGMMA_64(type)                                                                   \
  asm volatile(                                                                                    \
      "{ .reg .pred accumulate;\n"                                                                 \
      "  setp.ne.b32 accumulate, %37, 0;\n"                                                        \
      "  wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "          \
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 0; }"                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))

// Issues one product; the registers of a and d may be touched again after WgmmaWait.
template <DType kCompute, int kColumns>
__device__ __forceinline__ void Wgmma(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (kColumns == 32) {
    if constexpr (kCompute == DType::kBf16)
      TRIBUTARY_WGMMA_32("bf16");
    else
      TRIBUTARY_WGMMA_32("f16");
  } else {
    static_assert(kColumns == 64);
    if constexpr (kCompute == DType::kBf16)
      TRIBUTARY_WGMMA_64("bf16");
    else
      TRIBUTARY_WGMMA_64("f16");
  }
}

#undef TRIBUTARY_WGMMA_32
#undef TRIBUTARY_WGMMA_64

// Makes ordinary stores to shared memory visible to the products that other warps issue after a
// barrier.
__device__ __forceinline__ void FenceSharedForWgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8x8 tiles, held as accumulator tiles are, transposed; lane l gives the address of row
// l % 8 of tile l / 8.
__device__ __forceinline__ void StoreTransposed(uint32_t shared_address, uint32_t tile0,
                                                uint32_t tile1, uint32_t tile2, uint32_t tile3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address),
               "r"(tile0), "r"(tile1), "r"(tile2), "r"(tile3)
               : "memory");
}

}  // namespace tributary::cuda
