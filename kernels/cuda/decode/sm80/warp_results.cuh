// How what the warps of a thread block of mma_attention computed for an item is added up.
#pragma once

#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

// What the warps of a thread block computed of each packed row, each warp over its own keys.
template <int kWarps, int kTileRows>
struct WarpResults {
  static constexpr int kPadded = (kWarps + 3) / 4 * 4;  // whole vectors of four
  alignas(16) float reference[kTileRows][kPadded];
  alignas(16) float sum[kTileRows][kPadded];  // of the weights
};

// What the warps' unnormalised outputs of a packed row are multiplied by to be added up. Every
// thread finds it for itself: that takes less time than a barrier behind one that finds it for all.
template <int kWarps>
struct WarpFactors {
  float of_warp[kWarps];
  float lse2;  // LSE of all warps together, in base 2

  // v_scale: what sums of values are multiplied by.
  template <int kTileRows>
  __device__ __forceinline__ WarpFactors(const WarpResults<kWarps, kTileRows>& results,
                                         int packed_row, float v_scale) {
    float sums[kWarps];
    Read(results.reference[packed_row], of_warp);
    Read(results.sum[packed_row], sums);
    float reference = of_warp[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) reference = fmaxf(reference, of_warp[w]);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      of_warp[w] = Exp2(of_warp[w] - reference);
      sum = fmaf(sums[w], of_warp[w], sum);
    }
    const float scale = sum == 0.0f ? 0.0f : v_scale / sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warp[w] *= scale;
    lse2 = sum == 0.0f ? EmptyLse<float>() : reference + __log2f(sum);
  }

 private:
  static __device__ __forceinline__ void Read(const float* from, float (&to)[kWarps]) {
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + w);
      const float parts[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (w + i < kWarps) to[w + i] = parts[i];
      }
    }
  }
};

}  // namespace tributary::cuda
