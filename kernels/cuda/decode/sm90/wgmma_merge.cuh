// How the two warpgroups of wgmma_attention.cuh add up what they found of an item, so that each
// holds one half of the block's normalised output.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/wgmma_operands.cuh"
#include "kernels/cuda/decode/sm90/wgmma_softmax.cuh"

namespace tributary::cuda {

// By what the warpgroups' outputs are multiplied, each warp for itself: that takes no longer than
// a barrier would.
template <typename Traits>
__device__ __forceinline__ void FindFactors(Warpgroup<Traits>& wg, const WorkItem& item,
                                            bool of_cluster) {
  float2* const factors = wg.shared.factors[wg.warpgroup * 4 + wg.warp];
#pragma unroll
  for (int i = 0; i < Traits::kTileRows; i += 32) {
    const int c = (threadIdx.x + i) % Traits::kTileRows;
    PerWarpgroup sums = {};
#pragma unroll
    for (int g = 0; g < Traits::kWarpgroups; ++g) {
#pragma unroll
      for (int w = 0; w < 4; ++w) sums.of[g] += wg.shared.of_warps[4 * g + w][c];
    }
    const PackedRowSum sum =
        SumOfWarpgroups(sums, {wg.shared.reference[0][c], wg.shared.reference[1][c]},
                        wg.shared.v_scale, Traits::kBias);
    factors[c] = make_float2(sum.factors[0], sum.factors[1]);
    if (i == 0 && threadIdx.x < Traits::kTileRows) {
      wg.shared.lse2[c] = sum.lse2;
      if (!of_cluster) StoreLse(wg.args, {wg.shared.target[c], item.split_count == 1}, sum.lse2);
    }
  }
  __syncwarp();
}

// Element i of dimensions `dims` of one half of what a warpgroup found.
template <int kHalf, typename Traits>
__device__ __forceinline__ float& Element(Warpgroup<Traits>& wg, int dims, int i) {
  return wg.o[Traits::kDimsSplit ? kHalf * Traits::kOwnDimTiles + dims : dims]
             [(Traits::kDimsSplit ? 0 : kHalf * Traits::kOwnTiles * 4) + i];
}
// Lays out one half of the output for the other warpgroup: no factors yet, so that both need only
// one barrier.
template <int kHalf, typename Traits>
__device__ __forceinline__ void Give(Warpgroup<Traits>& wg) {
#pragma unroll
  for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
#pragma unroll
    for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
      const int i = tile * 4;
      wg.shared.scratch[wg.warpgroup].half[dims * Traits::kOwnTiles + tile][threadIdx.x % 128] =
          make_float4(Element<kHalf>(wg, dims, i), Element<kHalf>(wg, dims, i + 1),
                      Element<kHalf>(wg, dims, i + 2), Element<kHalf>(wg, dims, i + 3));
    }
  }
}
template <int kHalf, typename Traits>
__device__ __forceinline__ void Take(Warpgroup<Traits>& wg) {
  // A warpgroup keeps the half of its own number.
  constexpr int kOther = 1 - kHalf;
#pragma unroll
  for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
    const int packed_row =
        PackedRowOfTile(wg.lane, tile + (Traits::kDimsSplit ? 0 : kHalf * Traits::kOwnTiles));
    const float4 x = *reinterpret_cast<const float4*>(
        &wg.shared.factors[wg.warpgroup * 4 + wg.warp][packed_row]);
    const float factors[2][2] = {{x.x, x.y}, {x.z, x.w}};  // of a packed row, of a warpgroup
#pragma unroll
    for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
      const float4 given =
          wg.shared.scratch[kOther].half[dims * Traits::kOwnTiles + tile][threadIdx.x % 128];
      const float of_other[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wg.own[dims][tile * 4 + i] =
            Element<kHalf>(wg, dims, tile * 4 + i) * factors[i % 2][kHalf] +
            of_other[i] * factors[i % 2][kOther];
      }
    }
  }
}

// Adds up what the warpgroups found, brings to shared memory
// where the result goes; writes the LSE unless the cluster merges it first. meet(): the computing
// threads' barrier.
template <typename Traits, typename Meet>
__device__ __forceinline__ void Combine(Warpgroup<Traits>& wg, const WorkItem& item,
                                        bool of_cluster, Meet meet) {
  const int packed_row = ReduceRows(wg.sum, [](float a, float b) { return a + b; });
#pragma unroll
  for (int i = 0; i < Traits::kCells / 8; ++i) {
    wg.shared.of_warps[wg.warpgroup * 4 + wg.warp][packed_row + i] = wg.sum[i];
  }
  const int c = threadIdx.x;
  if (c < Traits::kTileRows) {
    wg.shared.target[c] = RowOfOutput<Traits::kTileRows>(wg.args, item, c).index;
  }
  // The last product is done, and the weights give way.
  SyncWarpgroup(kWarpgroupBarrier + wg.warpgroup);
  if (wg.warpgroup == 0) {
    Give<1>(wg);
  } else {
    Give<0>(wg);
  }
  meet();
  FindFactors(wg, item, of_cluster);
  if (wg.warpgroup == 0) {
    Take<0>(wg);
  } else {
    Take<1>(wg);
  }
}

// store(packed_row, d, x) takes dimensions d and d + 1 of a packed row of the block's normalised
// output.
template <typename Store, typename Traits>
__device__ __forceinline__ void ForEachOutput(const Warpgroup<Traits>& wg, Store store) {
  const int first_packed_row = Traits::kDimsSplit ? 0 : wg.warpgroup * Traits::kOwnTileRows;
  const int first_tile = Traits::kDimsSplit ? wg.warpgroup * Traits::kOwnDimTiles : 0;
#pragma unroll
  for (int dims = 0; dims < Traits::kOwnDimTiles; ++dims) {
    const int d = DimsOfTile<Traits>(first_tile + dims);
    if (Traits::kDimsPadded && d >= Traits::kValueDim) continue;
#pragma unroll
    for (int tile = 0; tile < Traits::kOwnTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        store(first_packed_row + PackedRowOfTile(wg.lane, tile) + c, d,
              make_float2(wg.own[dims][tile * 4 + c], wg.own[dims][tile * 4 + c + 2]));
      }
    }
  }
}

}  // namespace tributary::cuda
