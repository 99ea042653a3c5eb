// What the kernels that attend to a draft block have in common. A draft block's rows attend to the
// few new tokens that came with them, in full precision.
//
// Packed rows are query rows times the query heads of a KV head, as in attention over the context.
// A warp takes 16 packed rows and 16 tokens at a time, by mma.sync: packed rows in M, tokens in N.
#pragma once

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

inline constexpr int kDraftRows = 16;    // of a warp
inline constexpr int kDraftTokens = 16;  // at a time

// Turns raw products into logits (base 2): -inf where a packed row may not see a token. keys: the
// ranges of this thread's two packed rows, of tokens numbered as first_token is.
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

// Packs weights as operand A of the product with values.
template <DType kCompute>
__device__ __forceinline__ void PackDraftWeights(const float (&s)[2][4], uint32_t (&p)[4]) {
  p[0] = Pack<kCompute>(s[0][0], s[0][1]);
  p[1] = Pack<kCompute>(s[0][2], s[0][3]);
  p[2] = Pack<kCompute>(s[1][0], s[1][1]);
  p[3] = Pack<kCompute>(s[1][2], s[1][3]);
}

}  // namespace tributary::cuda
