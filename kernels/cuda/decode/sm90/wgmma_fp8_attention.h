// Attention of 64 packed rows at a time over an FP8 cache with head dim 64 or 128, or an NVFP4 one
// with 128, queries in bf16, without a soft cap; see wgmma_fp8_attention.cuh. sm_90a only. Plans
// are those of RunWgmmaAttention.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/dtype.h"
#include "kernels/head_dims.h"

namespace tributary::cuda {

// Whether the kernel is built for this type of cache and these head dims.
constexpr bool HasWgmmaFp8(DType kv, int32_t key_dim, int32_t value_dim) {
  if (kv == DType::kNvfp4) return HasKernel<&HeadDims::decode_sm90_nvfp4>(key_dim, value_dim);
  return IsFp8(kv) && HasKernel<&HeadDims::decode_sm90_fp8>(key_dim, value_dim);
}

// Launches, or says why it could not.
template <DType kKv, int kHeadDim>
cudaError_t RunWgmmaFp8Attention(const AttentionArgs& args, const Grid& grid, cudaStream_t stream);

}  // namespace tributary::cuda
