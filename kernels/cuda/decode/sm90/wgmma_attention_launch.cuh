#pragma once

#include "kernels/cuda/decode/sm90/wgmma_attention.cuh"
#include "kernels/cuda/decode/sm90/wgmma_attention.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

template <DType kKv, int kKeyDim, int kValueDim, int kTileRows>
cudaError_t RunWgmmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = WgmmaTraits<kKv, kKeyDim, kValueDim, kTileRows>;
  static_assert(kTileRows <= WidestWgmmaTile(kValueDim));
  static_assert(kComputeWarpgroups * kTileStrips == kWgmmaShareStrips);
  return LaunchGrid(WgmmaAttentionKernel<Traits>, args, grid, Traits::kBlockThreads,
                    sizeof(typename Traits::Shared), stream);
}

}  // namespace tributary::cuda

// One type of cache, the dimensions of its keys and values, and one width.
#define TRIBUTARY_WGMMA_ATTENTION(kv, key_dim, value_dim, packed_rows)         \
  namespace tributary::cuda {                                                  \
  template cudaError_t RunWgmmaAttention<kv, key_dim, value_dim, packed_rows>( \
      const AttentionArgs&, const Grid&, cudaStream_t);                        \
  }
