// What kernels have in common that attend to a draft's block: rows over the few new tokens they
// came with, in full precision.
//
// Columns are rows times query heads of a kv head, as in attention over the context. A warp takes
// 16 of them and 16 tokens at a time, by mma.sync: columns in M, tokens in N.
#pragma once

#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

inline constexpr int kDraftColumns = 16;  // of a warp
inline constexpr int kDraftTokens = 16;   // at a time

// From raw products to logits (base 2), -inf where a column may not see a token. keys: of this
// thread's two columns, tokens as first_token counts them.
__device__ __forceinline__ void MakeDraftLogits(float sm_scale, float soft_cap,
                                                const RowKeys (&keys)[2], int first_token,
                                                float (&s)[2][4]) {
  const bool capped = soft_cap > 0.0f;
  const float scale = capped ? __fdividef(sm_scale, soft_cap) : sm_scale * kLog2E;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] *= scale;
    if (capped) CapLogits(soft_cap, s[tile]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + tile * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
      const RowKeys& seen = keys[i / 2];
      if (token < seen.begin || token >= seen.end) s[tile][i] = EmptyLse<float>();
    }
  }
}

// Weights as operand A of the product with values.
template <DType kCompute>
__device__ __forceinline__ void PackDraftWeights(const float (&s)[2][4], uint32_t (&p)[4]) {
  p[0] = Pack<kCompute>(s[0][0], s[0][1]);
  p[1] = Pack<kCompute>(s[0][2], s[0][3]);
  p[2] = Pack<kCompute>(s[1][0], s[1][1]);
  p[3] = Pack<kCompute>(s[1][2], s[1][3]);
}

}  // namespace tributary::cuda
