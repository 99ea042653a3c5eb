#pragma once

#include "kernels/cuda/mma_attention.cuh"
#include "kernels/cuda/mma_attention.h"

namespace tributary::cuda {

template <DType kKv, int kHeadDim, int kColumnTiles>
cudaError_t RunMmaAttention(const AttentionArgs& args, int blocks, cudaStream_t stream) {
  using Traits = MmaTraits<kKv, kHeadDim, kColumnTiles>;
  const auto kernel = MmaAttentionKernel<Traits>;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <DType kKv, int kHeadDim, int kColumnTiles>
int MmaWarps() {
  return MmaTraits<kKv, kHeadDim, kColumnTiles>::kWarps;
}

}  // namespace tributary::cuda

// One kv dtype and head dim: both widths.
#define TRIBUTARY_MMA_ATTENTION(kv, head_dim)                                                     \
  namespace tributary::cuda {                                                                     \
  template cudaError_t RunMmaAttention<kv, head_dim, 1>(const AttentionArgs&, int, cudaStream_t); \
  template cudaError_t RunMmaAttention<kv, head_dim, 2>(const AttentionArgs&, int, cudaStream_t); \
  template int MmaWarps<kv, head_dim, 1>();                                                       \
  template int MmaWarps<kv, head_dim, 2>();                                                       \
  }
