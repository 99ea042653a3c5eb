#pragma once

#include "kernels/cuda/decode/sm80/mma_attention.cuh"
#include "kernels/cuda/decode/sm80/mma_attention.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

template <DType kKv, int kKeyDim, int kValueDim, int kRowTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = MmaTraits<kKv, kKeyDim, kValueDim, kRowTiles, kBlocksPerMultiprocessor>;
  return LaunchGrid(MmaAttentionKernel<Traits>, args, grid, Traits::kThreads,
                    sizeof(typename Traits::Shared), stream);
}

}  // namespace tributary::cuda

#define TRIBUTARY_MMA_ATTENTION_SHAPE(kv, key_dim, value_dim, tiles, blocks)   \
  template cudaError_t RunMmaAttention<kv, key_dim, value_dim, tiles, blocks>( \
      const AttentionArgs&, const Grid&, cudaStream_t);

// One type of cache and one row of the table of head dims: both tile heights in both shapes.
#define TRIBUTARY_MMA_ATTENTION(kv, key_dim, value_dim)       \
  namespace tributary::cuda {                                 \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, key_dim, value_dim, 1, 1) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, key_dim, value_dim, 1, 2) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, key_dim, value_dim, 2, 1) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, key_dim, value_dim, 2, 2) \
  }
