// What the copying thread and the computing warpgroups of wgmma_prefill share: rings of tiles in
// shared memory, the barriers that guard them, and how both number the tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_config.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"

namespace tributary::cuda {

// How many of a thread block's items the first pass takes, and can mark for the second. Any further
// ones are left to the second pass.
inline constexpr int kMarkedItems = 2048;

// Sums in fp32 of outputs that are summed in less (kWgmmaPrefillSummedTiles): four at a time, each
// thread its own. Values of sixteen bits have none.
template <typename Traits, bool kHasSums>
struct PrefillSums {};
template <typename Traits>
struct PrefillSums<Traits, true> {
  float4 of[Traits::kPaddedValueDim / 8][Traits::kThreads];
};

// The shared memory of a thread block. A "full" barrier has one arrival, the copying thread's, and
// counts the bytes that land. An "empty" barrier has one arrival of every thread that computes.
template <typename Traits>
struct WgmmaPrefillShared {
  typename Traits::Queries q[Traits::kQueryStages];
  typename Traits::Keys k[Traits::kStages];
  typename Traits::Values v[Traits::kStages];
  PrefillSums<Traits, Traits::kFp8Values> sums;
  CopyBarrier q_full[Traits::kQueryStages];
  CopyBarrier q_empty[Traits::kQueryStages];
  CopyBarrier k_full[Traits::kStages];
  CopyBarrier k_empty[Traits::kStages];
  CopyBarrier v_full[Traits::kStages];
  CopyBarrier v_empty[Traits::kStages];
  // Items with keys that are attended to a second time (prefill/hidden_values.cuh): the n-th of the
  // thread block is bit n of the words of each computing warp that wants it. The first pass ends
  // when every thread that computes has arrived.
  uint32_t again[Traits::kThreads / 32][kMarkedItems / 32];
  int second_pass;  // whether there is one
  CopyBarrier first_pass;

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
    first_pass.Init(Traits::kThreads);
    FenceBarrierInit();
    second_pass = 0;
  }
  // By all threads, before they meet.
  __device__ void ClearMarks() {
    auto* const words = &again[0][0];
    for (int i = threadIdx.x; i < sizeof(again) / sizeof(*words); i += Traits::kBlockThreads) {
      words[i] = 0;
    }
  }

  // Whether this warp wants the n-th item in the second pass, and whether any warp does.
  __device__ bool WantedBy(int warp, int n) const {
    return n >= kMarkedItems || (again[warp][n / 32] >> n % 32 & 1) != 0;
  }
  __device__ bool Wanted(int n) const {
    bool wanted = false;
#pragma unroll 1
    for (int warp = 0; warp < Traits::kThreads / 32; ++warp) wanted |= WantedBy(warp, n);
    return wanted;
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
