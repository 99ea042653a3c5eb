#pragma once

#include "kernels/cuda/decode/sm90/wgmma_attention.cuh"
#include "kernels/cuda/decode/sm90/wgmma_attention.h"

namespace tributary::cuda {

template <DType kKv, int kHeadDim, int kColumns>
cudaError_t RunWgmmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = WgmmaTraits<kKv, kHeadDim, kHeadDim, kColumns>;
  static_assert(kComputeWarpgroups * kTileGroups == kWgmmaShareGroups);
  return LaunchGrid(WgmmaAttentionKernel<Traits>, args, grid, Traits::kBlockThreads,
                    sizeof(typename Traits::Shared), stream);
}

}  // namespace tributary::cuda

// One kv dtype, head dim and width.
#define TRIBUTARY_WGMMA_ATTENTION(kv, head_dim, columns)                                           \
  namespace tributary::cuda {                                                                      \
  template cudaError_t RunWgmmaAttention<kv, head_dim, columns>(const AttentionArgs&, const Grid&, \
                                                                cudaStream_t);                     \
  }
