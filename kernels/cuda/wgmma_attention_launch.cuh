#pragma once

#include "kernels/cuda/wgmma_attention.cuh"
#include "kernels/cuda/wgmma_attention.h"

namespace tributary::cuda {

template <DType kKv, int kHeadDim, int kColumns>
cudaError_t RunWgmmaAttention(const AttentionArgs& args, int blocks, cudaStream_t stream) {
  using Traits = WgmmaTraits<kKv, kHeadDim, kColumns>;
  static_assert(Traits::kWarpgroups * Traits::kTileGroups == kWgmmaShareGroups);
  const auto kernel = WgmmaAttentionKernel<Traits>;
  constexpr int kBytes = sizeof(typename Traits::Shared);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kBlockThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tributary::cuda

// One kv dtype, head dim and width.
#define TRIBUTARY_WGMMA_ATTENTION(kv, head_dim, columns)                                   \
  namespace tributary::cuda {                                                              \
  template cudaError_t RunWgmmaAttention<kv, head_dim, columns>(const AttentionArgs&, int, \
                                                                cudaStream_t);             \
  }
