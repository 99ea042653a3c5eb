#pragma once

#include "kernels/cuda/decode/sm80/mma_attention.cuh"
#include "kernels/cuda/decode/sm90/mma_rings.cuh"
#include "kernels/cuda/decode/sm90/mma_rings.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaWithRings(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits =
      MmaTraits<kKv, kKeyDim, kValueDim, kRowTiles, kBlocksPerMultiprocessor, /*kWithRings=*/true>;
  static_assert(sizeof(typename Traits::Shared) <= Traits::Shared::kMostBytes);
  return LaunchGrid(MmaAttentionKernel<Traits>, args, grid, Traits::kThreads,
                    sizeof(typename Traits::Shared), stream);
}

}  // namespace tributary::cuda

#define TRIBUTARY_MMA_RINGS_SHAPE(kv, key_dim, value_dim, tiles, blocks)       \
  template cudaError_t RunMmaWithRings<kv, key_dim, value_dim, tiles, blocks>( \
      const AttentionArgs&, const Grid&, cudaStream_t);

// One type of cache and one row of the table of head dims, as TRIBUTARY_MMA_ATTENTION.
#define TRIBUTARY_MMA_RINGS(kv, key_dim, value_dim)       \
  namespace tributary::cuda {                             \
  TRIBUTARY_MMA_RINGS_SHAPE(kv, key_dim, value_dim, 1, 1) \
  TRIBUTARY_MMA_RINGS_SHAPE(kv, key_dim, value_dim, 1, 2) \
  TRIBUTARY_MMA_RINGS_SHAPE(kv, key_dim, value_dim, 2, 1) \
  TRIBUTARY_MMA_RINGS_SHAPE(kv, key_dim, value_dim, 2, 2) \
  }
