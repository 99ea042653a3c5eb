// The few instructions that CUDA C++ has no name for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/dtype.h"

namespace tributary::cuda {

// Cache data is read once, and more of it than L2 holds: in L2 it goes before what the next launch
// begins with (instructions, the plan, queries).
__device__ __forceinline__ uint64_t ReadOnce() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Of cache data, which must not displace anything in L1 either. Volatile keeps the loads where the
// kernel puts them, far ahead of their use.
__device__ __forceinline__ uint4 LoadStreaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(ReadOnce()));
  return v;
}

__device__ __forceinline__ uint2 LoadStreaming8(const void* address) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address), "l"(ReadOnce()));
  return v;
}

// The same of as many bytes as x has: 16, 8, 4 or 2.
__device__ __forceinline__ void LoadStreamingTo(const void* address, uint4& x) {
  x = LoadStreaming(address);
}
__device__ __forceinline__ void LoadStreamingTo(const void* address, uint2& x) {
  x = LoadStreaming8(address);
}
__device__ __forceinline__ void LoadStreamingTo(const void* address, uint32_t& x) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;"
               : "=r"(x)
               : "l"(address), "l"(ReadOnce()));
}
__device__ __forceinline__ void LoadStreamingTo(const void* address, uint16_t& x) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.u16 %0, [%1], %2;"
               : "=h"(x)
               : "l"(address), "l"(ReadOnce()));
}

// Stores that others on this GPU may see at any time, a word whole.
__device__ __forceinline__ void StoreRelaxed(float* to, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void StoreRelaxed(float* to, float2 x) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x.x), "f"(x.y)
               : "memory");
}
__device__ __forceinline__ void StoreRelaxed(float* to, float x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Copies 16 bytes from global to shared memory without passing through registers; complete, for
// this thread, after WaitForCopies.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
// The same of cache data, which is read once. Such copies are counted in groups.
__device__ __forceinline__ void CopyStreaming16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "l"(ReadOnce())
               : "memory");
}
// Ends a group of copies, of this thread; waits for all groups but the last kPending.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForCopiesBut() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Copies 16 or 8 bytes, or zeros when there is nothing to copy; `global` is not read then.
__device__ __forceinline__ void CopyAsync16OrZero(void* shared, const void* global, bool alive) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(alive ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsync8OrZero(void* shared, const void* global, bool alive) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(alive ? 8 : 0)
               : "memory");
}
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Adds to a counter, without waiting for it.
__device__ __forceinline__ void AddRelaxed(uint64_t* counter, uint64_t value) {
  asm volatile("red.add.relaxed.gpu.global.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}
// Adds to a counter and returns what it was; orders what this thread has seen and written, and what
// it will, as a release and an acquire.
__device__ __forceinline__ uint64_t AddAcquireRelease(uint64_t* counter, uint64_t value) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(value)
               : "memory");
  return before;
}
// The same without any order.
__device__ __forceinline__ uint64_t AddRelaxedAndFetch(uint64_t* counter, uint64_t value) {
  uint64_t before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(counter), "l"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ uint64_t LoadRelaxed(const uint64_t* counter) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(counter) : "memory");
  return x;
}
__device__ __forceinline__ uint64_t LoadAcquire(const uint64_t* counter) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(counter) : "memory");
  return x;
}

// Four matrices of 8 rows of 16 bytes, four bytes of row lane / 4 of each; lane l gives the
// address, in shared memory, of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t shared, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}
// The same of 8 x 8 elements of 16 bits, transposed.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t shared, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// D += A B for a 16x16 tile A and a 16x8 tile B, both of the compute type, D in fp32.
template <DType kCompute>
__device__ __forceinline__ void Mma16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  if constexpr (kCompute == DType::kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Transposes an 8x8 matrix of 16-bit elements held by the warp as an accumulator tile is.
__device__ __forceinline__ uint32_t TransposeTile(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Two floats rounded to the compute type; `low` in the low half.
template <DType kCompute>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t y;
  if constexpr (kCompute == DType::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

// The larger of each of two pairs of the compute type; a NaN loses.
template <DType kCompute>
__device__ __forceinline__ uint32_t MaxOfPairs(uint32_t a, uint32_t b) {
  uint32_t y;
  if constexpr (kCompute == DType::kBf16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

// Whether either of a pair that is not negative exceeds a finite positive limit.
__device__ __forceinline__ bool AnyGreater(uint32_t pair, uint32_t limit) {
  // As for integers: the bits of numbers of one sign and type are in their order.
  return (pair & 0xffffu) > (limit & 0xffffu) || pair >> 16 > limit >> 16;
}

}  // namespace tributary::cuda
