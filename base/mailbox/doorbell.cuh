// Doorbells of a mailbox as GPUs ring and await them. session.proto says what they count.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "base/mailbox/layout.h"

namespace tributary::mailbox {

// What this thread wrote before, and what other threads wrote that it has met at a barrier, is seen
// by whoever sees what this thread writes from now on, and the other way about. `one_gpu`: both
// sides run on the GPU that the mailbox lies on, which costs a microsecond less per layer.
__device__ __forceinline__ void Fence(bool one_gpu) {
  if (one_gpu) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
}

// Sets a doorbell: whoever sees the new count sees all that is ordered before it.
__device__ __forceinline__ void Ring(uint32_t* doorbell, uint32_t count, bool one_gpu) {
  Fence(one_gpu);
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(doorbell), "r"(count) : "memory");
}

// The newest value of a word. It orders nothing.
__device__ __forceinline__ uint32_t Look(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Waits until a doorbell has reached `count`, the session has ended, or `bound` nanoseconds have
// passed. For one thread: what it then passes on at a barrier may be read by the others.
__device__ __forceinline__ Awaited Await(const uint32_t* doorbell, uint32_t count,
                                         const uint32_t* status, uint64_t bound, bool one_gpu) {
  constexpr int kLooks = 64;  // between two looks at the clock
  uint64_t begin = 0;
  while (true) {
    for (int i = 0; i < kLooks; ++i) {
      const uint32_t rung = Look(doorbell);
      const uint32_t ended = Look(status);
      if (ended == 0 && !Reached(rung, count)) continue;
      Fence(one_gpu);
      return ended == 0 ? Awaited::kReached : Awaited::kEnded;
    }
    const uint64_t now = Nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin > bound) return Awaited::kTimedOut;
  }
}

}  // namespace tributary::mailbox
