// What lets the blocks of a launch work together, and a launch begin before the one ahead of it has
// ended. Both are sm_90's; on earlier architectures a block is a cluster of its own.
#pragma once

#include <cstdint>

#include "base/cuda/early_launch.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"

namespace tributary::cuda {

// This block among the blocks of its cluster.
struct ClusterPlace {
  uint32_t rank = 0;
  uint32_t size = 1;
  uint32_t cluster = 0;  // among the clusters of the grid

  // Its size is a power of two: this one.
  __device__ __forceinline__ int SizeLog2() const { return 31 - __clz(static_cast<int>(size)); }
};

__device__ __forceinline__ ClusterPlace ThisCluster() {
  ClusterPlace place;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(place.rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(place.size));
  // (The variable for it takes a division.)
  place.cluster = blockIdx.x >> place.SizeLog2();
#else
  place.cluster = blockIdx.x;
#endif
  return place;
}

// Brings 128 bytes towards this GPU's processors. No value is read: it may be written meanwhile.
__device__ __forceinline__ void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The address, valid all over the cluster, of a variable of this block's shared memory in the block
// of that rank.
__device__ __forceinline__ uint32_t SharedAddressIn(const void* p, uint32_t rank) {
  uint32_t address = SharedAddress(p);
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

__device__ __forceinline__ float4 LoadFloat4In(uint32_t address) {
  float4 x;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
#endif
  return x;
}
__device__ __forceinline__ float LoadFloatIn(uint32_t address) {
  float x;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address));
#else
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
#endif
  return x;
}

// Waits for the end of the phase of this parity, and sees what other blocks wrote before it.
__device__ __forceinline__ void WaitAcquireCluster(CopyBarrier& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "again_%=:\n"
      "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "  @!done bra again_%=; }" ::"r"(SharedAddress(&barrier.state)),
      "r"(parity)
      : "memory");
#endif
}

// A barrier of the computing threads of all blocks of a cluster. Other threads, which may be far
// ahead or gone, take no part: the cluster's own barrier would wait for them.
class ClusterBarrier {
 public:
  // By one thread of every block; then the cluster's own barrier. `threads`: of a block, that
  // arrive.
  __device__ void Init(uint32_t size, uint32_t threads) {
#if __CUDA_ARCH__ >= 900
    block_.Init(threads);
    barrier_.Init(size);
#endif
  }
  // By all of these threads, in the phase of this parity.
  __device__ void Arrive(const ClusterPlace& place, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    block_.Arrive();
    if (threadIdx.x < place.size) {
      block_.Wait(parity);
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                       SharedAddressIn(&barrier_.state, threadIdx.x))
                   : "memory");
    }
#endif
  }
  // By every thread that reads what other blocks wrote, or is to overwrite what they read.
  __device__ void Wait(uint32_t parity) { WaitAcquireCluster(barrier_, parity); }

 private:
  CopyBarrier block_;    // its threads
  CopyBarrier barrier_;  // blocks whose threads have come
};

// A barrier that counts what other blocks of a cluster store here.
class InboxBarrier {
 public:
  // By one thread.
  __device__ void Init() { barrier_.Init(1); }
  // By one thread, once a phase: it ends when so many bytes have come.
  __device__ void Expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    barrier_.ArriveAndExpect(bytes);
#endif
  }
  // By every thread that reads what has come.
  __device__ void Wait(uint32_t parity) { WaitAcquireCluster(barrier_, parity); }
  // Of the same barrier of another block.
  __device__ uint32_t AddressIn(uint32_t rank) const {
    return SharedAddressIn(&barrier_.state, rank);
  }

 private:
  CopyBarrier barrier_;
};

// Stores to the shared memory of another block, without waiting; its barrier counts the bytes.
__device__ __forceinline__ void StoreAsyncIn(uint32_t address, float4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void StoreAsyncIn(uint32_t address, float x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(x), "r"(barrier)
      : "memory");
#endif
}

// The cluster's own barrier, of all threads of all its blocks that have not ended: between the two
// halves something else may be done. It publishes nothing: an arrival that does would wait for all
// that the thread has stored to global memory. The hardware is content when all have arrived; tools
// that check for races take it as met when all have waited, so whoever goes on waits as well.
__device__ __forceinline__ void ArriveAtCluster(const ClusterPlace& place) {
#if __CUDA_ARCH__ >= 900
  if (place.size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster(const ClusterPlace& place) {
#if __CUDA_ARCH__ >= 900
  if (place.size > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace tributary::cuda
