// Queries as operand A of products with widened keys of NVFP4, for wgmma_fp8_attention.cuh: f16.
#pragma once

#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// Sixteen elements of a query in f16.
struct WholeQuery {
  uint4 halves[2];
};

// From bf16. kVectors neighbouring lanes hold a whole query; words[.][i] is this lane's part of the
// i-th one. A query is multiplied by a power of two that brings its largest element just below
// 2^14, and its scale is divided by that.
template <int kVectors, int kQueries>
__device__ __forceinline__ void NormaliseQueries(const uint32_t (&words)[kQueries][8],
                                                 float (&scales)[kQueries],
                                                 WholeQuery (&queries)[kQueries]) {
#pragma unroll
  for (int n = 0; n < kQueries; ++n) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = MaxOfPairs<DType::kBf16>(largest, words[n][i] & 0x7fff7fffu);
    }
#pragma unroll
    for (int lane = kVectors / 2; lane > 0; lane /= 2) {
      largest = MaxOfPairs<DType::kBf16>(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    }
    const float max_abs =
        fmaxf(__uint_as_float(largest << 16), __uint_as_float(largest & 0xffff0000u));
    const PowerOfTwo normaliser = QueryNormaliser<14>(max_abs);
    // The sign of a negative scale goes into the query, so that the largest product is the largest
    // logit.
    const float factor = scales[n] < 0.0f ? -normaliser.value : normaliser.value;
    scales[n] = fabsf(scales[n]) * normaliser.inverse;
    uint32_t x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = Pack<DType::kF16>(__uint_as_float(words[n][i] << 16) * factor,
                               __uint_as_float(words[n][i] & 0xffff0000u) * factor);
    }
    queries[n].halves[0] = make_uint4(x[0], x[1], x[2], x[3]);
    queries[n].halves[1] = make_uint4(x[4], x[5], x[6], x[7]);
  }
}

}  // namespace tributary::cuda
