// Bulk copies from global to shared memory (sm_90) and the barriers in shared memory that count
// them.
#pragma once

#include <cstdint>

namespace tributary::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier whose phase ends when `arrivals` have come and all bytes announced have landed.
//
// Who has read or written what the barrier guards arrives himself, each thread: for the hardware
// one thread could arrive for a warp that has met, but tools that check for races take an arrival
// for the arriving thread's only. What only products and the copy engine touch they do not follow;
// there one thread arrives for its warp.
struct alignas(8) CopyBarrier {
  uint64_t state;

  __device__ void Init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(&state)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void Arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(&state))
                 : "memory");
  }
  // Stands for so many arrivals.
  __device__ void ArriveFor(uint32_t arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(&state)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ void ArriveAndExpect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(&state)),
        "r"(bytes)
        : "memory");
  }
  // Waits for the end of the phase of this parity (the first phase has parity 0).
  __device__ void Wait(uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again_%=:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "  @!done bra again_%=; }" ::"r"(SharedAddress(&state)),
        "r"(parity)
        : "memory");
  }
};

// Where threads of a block meet that are not all of it. A named barrier would do, but racecheck
// seems to lose such meetings when the other warps of the block end at the time.
class BlockBarrier {
 public:
  __device__ void Init(uint32_t threads) { barrier_.Init(threads); }
  // By all these threads. `parity`: each thread's own, 0 at first.
  __device__ void Meet(uint32_t& parity) {
    barrier_.Arrive();
    barrier_.Wait(parity);
    parity ^= 1;
  }

 private:
  CopyBarrier barrier_;
};

// Makes barriers just initialised known to the copy engine, and to the cluster's other blocks.
__device__ __forceinline__ void FenceBarrierInit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Copies `bytes` (a multiple of 16, both ends aligned to 16) and reports to the barrier. `policy`:
// of L2, ptx.cuh.
__device__ __forceinline__ void BulkCopy(void* shared, const void* global, uint32_t bytes,
                                         CopyBarrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(&barrier.state)), "l"(policy)
      : "memory");
}

}  // namespace tributary::cuda
