// The named barriers of the kernels of warpgroups (bar.sync, bar.arrive): a thread block has 16.
#pragma once

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

}  // namespace tributary::cuda
