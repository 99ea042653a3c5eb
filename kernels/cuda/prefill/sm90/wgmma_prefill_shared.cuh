// What the copying thread and the computing warpgroups of wgmma_prefill share: rings of tiles in
// shared memory, the barriers that guard them, and how both number the tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_config.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"

namespace tributary::cuda {

// The shared memory of a thread block. A "full" barrier has one arrival, the copying thread's, and
// counts the bytes that land. An "empty" barrier has one arrival of every thread that computes.
template <typename Traits>
struct WgmmaPrefillShared {
  typename Traits::Queries q[Traits::kQueryStages];
  typename Traits::Keys k[Traits::kStages];
  typename Traits::Values v[Traits::kStages];
  CopyBarrier q_full[Traits::kQueryStages];
  CopyBarrier q_empty[Traits::kQueryStages];
  CopyBarrier k_full[Traits::kStages];
  CopyBarrier k_empty[Traits::kStages];
  CopyBarrier v_full[Traits::kStages];
  CopyBarrier v_empty[Traits::kStages];

  // By one thread, before all threads of the block meet.
  __device__ void InitBarriers() {
    for (int i = 0; i < Traits::kQueryStages; ++i) {
      q_full[i].Init(1);
      q_empty[i].Init(Traits::kThreads);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      k_full[i].Init(1);
      v_full[i].Init(1);
      k_empty[i].Init(Traits::kThreads);
      v_empty[i].Init(Traits::kThreads);
    }
    FenceBarrierInit();
  }
};

// The stage of a ring that holds the n-th tile, or the n-th item's queries, of a thread block, and
// the parity of the barriers' phase for it.
template <int kStages>
struct PrefillRingPlace {
  int stage;
  uint32_t parity;
  __device__ explicit PrefillRingPlace(int n) : stage(n % kStages), parity(n / kStages % 2) {}
};

// Asks L1 for the description of the next item, which all warps read soon.
__device__ __forceinline__ void PrefetchItem(const PrefillKernelArgs& args, int index) {
  if (index >= 0) asm volatile("prefetch.global.L1 [%0];" ::"l"(args.items + index));
}

// The KV tiles of an item.
template <typename Traits>
__device__ __forceinline__ int TilesOf(const PrefillItem& item) {
  return max(0, (item.key_end - item.key_begin + Traits::kKeys - 1) / Traits::kKeys);
}

}  // namespace tributary::cuda
