// Values that the compiler is to keep in uniform registers, or to find again where they are used.
#pragma once

#include <cstdint>

namespace tributary::cuda {

// Zero, and the same in all lanes for all that the compiler knows. What is found from an address
// with it stays in uniform registers. Without it the compiler keeps the address of shared memory in
// each lane, as branches around the copies of queries need it, and every product of the loop waits
// for its descriptor to be brought from there.
__device__ __forceinline__ uint32_t UniformZero() {
  uint32_t zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return __shfl_sync(0xffffffffu, zero, 0);
}

// The lane, not known to the compiler before: what is found from it takes no registers ahead of
// this.
__device__ __forceinline__ int OpaqueLane() {
  return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32));
}

// A value, kept in a register: the compiler would rather find it again in every turn of a loop.
__device__ __forceinline__ uint32_t Kept(uint32_t x) {
  asm volatile("mov.u32 %0, %0;" : "+r"(x));
  return x;
}

}  // namespace tributary::cuda
