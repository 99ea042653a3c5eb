// The named barriers of the kernels of warpgroups (bar.sync, bar.arrive): a thread block has 16.
#pragma once

#include <cstdint>

namespace tributary::cuda {

enum NamedBarrier : int {
  kBlockBarrier = 0,            // all threads of the block (SyncBlock, __syncthreads)
  kWarpgroupBarrier = 1,        // one computing warpgroup; the second one's is the next
  kComputingBarrier = 8,        // all threads that compute (SyncThreads)
  kFp8WarpgroupBarrier = 9,     // wgmma_fp8_attention: one computing warpgroup; and the next
  kDraftBlockBarrier = 11,      // wgmma_fp8_attention: the warpgroup that widens values
  kPartsCollectedBarrier = 12,  // wgmma_fp8_attention: no thread looks at the job's state any more
};

// A barrier of one warpgroup of 128 threads.
__device__ __forceinline__ void SyncWarpgroup(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
// The same; returns to each of the threads whether any of them brought true.
__device__ __forceinline__ bool AnyOfWarpgroup(int barrier, bool brought) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred of_thread, of_any;\n"
      "  setp.ne.u32 of_thread, %2, 0;\n"
      "  bar.red.or.pred of_any, %1, 128, of_thread;\n"
      "  selp.u32 %0, 1, 0, of_any; }"
      : "=r"(any)
      : "r"(barrier), "r"(static_cast<uint32_t>(brought))
      : "memory");
  return any != 0;
}

}  // namespace tributary::cuda
