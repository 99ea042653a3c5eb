#pragma once

#include "kernels/cuda/decode/sm90/wgmma_attention.h"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/cuda/launch/grid.h"

namespace tributary::cuda {

template <typename Traits>
cudaError_t LaunchWgmmaFp8(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  static_assert(kComputeWarpgroups * kTileStrips == kWgmmaShareStrips);
  static_assert(sizeof(typename Traits::Shared) <= Traits::kSharedBytes);
  return LaunchGrid(WgmmaFp8AttentionKernel<Traits>, args, grid, Traits::kBlockThreads,
                    sizeof(typename Traits::Shared), stream);
}

template <DType kKv, int kHeadDim>
cudaError_t RunWgmmaFp8Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream) {
  if constexpr (kKv == DType::kNvfp4) {
    static_assert(kHeadDim == 128);
    return args.block.k != nullptr
               ? LaunchWgmmaFp8<WgmmaNvfp4Traits</*kDraft=*/true>>(args, grid, stream)
               : LaunchWgmmaFp8<WgmmaNvfp4Traits</*kDraft=*/false>>(args, grid, stream);
  } else {
    const auto launch = [&]<bool kDraft>() {
      return args.fp8_queries
                 ? LaunchWgmmaFp8<WgmmaFp8Traits<kKv, kHeadDim, kDraft, /*kQueryPieces=*/1>>(
                       args, grid, stream)
                 : LaunchWgmmaFp8<WgmmaFp8Traits<kKv, kHeadDim, kDraft, /*kQueryPieces=*/2>>(
                       args, grid, stream);
    };
    return args.block.k != nullptr ? launch.template operator()</*kDraft=*/true>()
                                   : launch.template operator()</*kDraft=*/false>();
  }
}

}  // namespace tributary::cuda

// One type of cache and head dim.
#define TRIBUTARY_WGMMA_FP8_ATTENTION(kv, head_dim)                                          \
  namespace tributary::cuda {                                                                \
  template cudaError_t RunWgmmaFp8Attention<kv, head_dim>(const AttentionArgs&, const Grid&, \
                                                          cudaStream_t);                     \
  }
