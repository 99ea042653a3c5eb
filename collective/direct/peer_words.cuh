// Accesses to memory that several GPUs write, and words that say for themselves whether they have
// arrived (direct_layout.h, kNotArrived).
//
// All accesses are relaxed and of system scope: they are never cached in L1, never torn within a
// word, and in no order among each other. The two exceptions, which order what is before or after
// them, are AcquireWord and ReleaseWord.
#pragma once

#include <cstdint>

#include "collective/direct/direct_layout.h"

namespace tributary::collective::direct {

__device__ __forceinline__ uint32_t LoadWord(const void* at) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void StoreWord(void* at, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 LoadPacket(const void* at) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
__device__ __forceinline__ void StorePacket(void* at, uint4 x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ uint32_t AcquireWord(const void* at) {
  uint32_t x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void ReleaseWord(void* at, uint32_t x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// What is sent in the place of a word: a NaN that reads as kNotArrived becomes another NaN.
__device__ __forceinline__ uint32_t Sendable(uint32_t word) {
  return word == kNotArrived ? kOtherNan : word;
}
__device__ __forceinline__ uint4 Sendable(uint4 p) {
  return make_uint4(Sendable(p.x), Sendable(p.y), Sendable(p.z), Sendable(p.w));
}
__device__ __forceinline__ bool Arrived(uint4 p) {
  return p.x != kNotArrived && p.y != kNotArrived && p.z != kNotArrived && p.w != kNotArrived;
}
__device__ __forceinline__ uint4 NothingArrived() {
  return make_uint4(kNotArrived, kNotArrived, kNotArrived, kNotArrived);
}

}  // namespace tributary::collective::direct
