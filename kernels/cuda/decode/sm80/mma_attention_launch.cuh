#pragma once

#include "kernels/cuda/decode/sm80/mma_attention.cuh"
#include "kernels/cuda/decode/sm80/mma_attention.h"

namespace tributary::cuda {

template <DType kKv, int kHeadDim, int kColumnTiles, int kBlocksPerMultiprocessor>
cudaError_t RunMmaAttention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  using Traits = MmaTraits<kKv, kHeadDim, kColumnTiles, kBlocksPerMultiprocessor>;
  return LaunchGrid(MmaAttentionKernel<Traits>, args, grid, Traits::kThreads,
                    sizeof(typename Traits::Shared), stream);
}

template <DType kKv, int kHeadDim, int kColumnTiles, int kBlocksPerMultiprocessor>
int MmaWarps() {
  return MmaTraits<kKv, kHeadDim, kColumnTiles, kBlocksPerMultiprocessor>::kWarps;
}

}  // namespace tributary::cuda

#define TRIBUTARY_MMA_ATTENTION_SHAPE(kv, head_dim, tiles, blocks)                              \
  template cudaError_t RunMmaAttention<kv, head_dim, tiles, blocks>(const AttentionArgs&,       \
                                                                    const Grid&, cudaStream_t); \
  template int MmaWarps<kv, head_dim, tiles, blocks>();

// One kv dtype and head dim: both widths in both shapes.
#define TRIBUTARY_MMA_ATTENTION(kv, head_dim)       \
  namespace tributary::cuda {                       \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, head_dim, 1, 1) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, head_dim, 1, 2) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, head_dim, 2, 1) \
  TRIBUTARY_MMA_ATTENTION_SHAPE(kv, head_dim, 2, 2) \
  }
