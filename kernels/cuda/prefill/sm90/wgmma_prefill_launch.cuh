// The launch of wgmma_prefill, and the macro that instantiates it for one pair of head dims.
#pragma once

#include <algorithm>

#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill.cuh"
#include "kernels/cuda/prefill/sm90/wgmma_prefill.h"

namespace tributary::cuda {

template <DType kScores, DType kCompute, int kKeyDim, int kValueDim>
cudaError_t RunWgmmaPrefill(const PrefillKernelArgs& args, int blocks, cudaStream_t stream) {
  using Traits = WgmmaPrefillTraits<kScores, kCompute, kKeyDim, kValueDim>;
  const auto kernel = WgmmaPrefillKernel<Traits>;
  constexpr int kBytes = sizeof(WgmmaPrefillShared<Traits>);
  static_assert(kBytes <= kWgmmaPrefillSharedBytes);
  // Rows without keys have a result, too, but a tensor map cannot have no rows: without tokens the
  // maps describe the queries, and nothing is read through them.
  const bool any = args.tokens > 0;
  const int tokens = any ? args.tokens : args.rows;
  PrefillTensorMaps maps;
  cudaError_t error = EncodeRows(args.q, args.rows, args.q_heads, Traits::kScoreBytes,
                                 Traits::kScoreRowBytes, Traits::kRows, &maps.q);
  if (error == cudaSuccess) {
    error = EncodeRows(any ? args.k : args.q, tokens, args.kv_heads, Traits::kScoreBytes,
                       Traits::kScoreRowBytes, Traits::kKeys, &maps.k);
  }
  if (error == cudaSuccess) {
    const int64_t tiles = tokens / Traits::kKeys;
    const int64_t rows = Traits::kFp8Values
                             ? std::max<int64_t>(tiles, 1) * args.kv_heads * Traits::kValueDim
                             : tokens;
    error = EncodeRows(any ? args.v : args.q, rows, Traits::kFp8Values ? 1 : args.kv_heads,
                       Traits::kValueBytes, Traits::kValueRowBytes, Traits::kValueRows, &maps.v);
  }
  if (error != cudaSuccess) return error;
  return LaunchGrid(kernel, args, {.clusters = blocks, .begins_early = true}, Traits::kBlockThreads,
                    kBytes, stream, maps);
}

}  // namespace tributary::cuda

// Every type of keys and of values, for one dimension of keys and one of values.
#define TRIBUTARY_WGMMA_PREFILL(key_dim, value_dim)                                           \
  namespace tributary::cuda {                                                                 \
  template cudaError_t RunWgmmaPrefill<DType::kBf16, DType::kBf16, key_dim, value_dim>(       \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  template cudaError_t RunWgmmaPrefill<DType::kF16, DType::kF16, key_dim, value_dim>(         \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  template cudaError_t RunWgmmaPrefill<DType::kFp8E4M3, DType::kF16, key_dim, value_dim>(     \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  template cudaError_t RunWgmmaPrefill<DType::kFp8E5M2, DType::kF16, key_dim, value_dim>(     \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  template cudaError_t RunWgmmaPrefill<DType::kFp8E4M3, DType::kFp8E4M3, key_dim, value_dim>( \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  template cudaError_t RunWgmmaPrefill<DType::kFp8E5M2, DType::kFp8E5M2, key_dim, value_dim>( \
      const PrefillKernelArgs&, int, cudaStream_t);                                           \
  }
