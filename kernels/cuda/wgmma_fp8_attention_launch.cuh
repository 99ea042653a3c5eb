#pragma once

#include "kernels/cuda/wgmma_attention.h"
#include "kernels/cuda/wgmma_fp8_attention.cuh"
#include "kernels/cuda/wgmma_fp8_attention.h"

namespace tributary::cuda {

template <DType kKv>
cudaError_t RunWgmmaFp8Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = WgmmaFp8Traits<kKv>;
  static_assert(kComputeWarpgroups * kTileGroups == kWgmmaShareGroups);
  static_assert(sizeof(typename Traits::Shared) <= Traits::kSharedBytes);
  return LaunchGrid(WgmmaFp8AttentionKernel<Traits>, args, grid, Traits::kBlockThreads,
                    sizeof(typename Traits::Shared), stream);
}

}  // namespace tributary::cuda

// One kv dtype.
#define TRIBUTARY_WGMMA_FP8_ATTENTION(kv)                                                         \
  namespace tributary::cuda {                                                                     \
  template cudaError_t RunWgmmaFp8Attention<kv>(const AttentionArgs&, const Grid&, cudaStream_t); \
  }
