// How the thread blocks of mma_attention combine, store and merge what their warps computed.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm80/mma_products.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// Puts a tile of 8 packed rows of a warp's unnormalised output where all threads can add it up.
template <typename Traits>
__device__ __forceinline__ void PublishTile(const Accumulator<Traits>& acc, int tile,
                                            typename Traits::Shared& shared) {
  constexpr int kDims = 2 * Traits::kTilesPerVector;  // a thread's neighbouring dimensions
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 0; i < Traits::kValueVectors; ++i) {
      float* to = &shared.o[threadIdx.x / 32][lane % 4 * 2 + c][(i * 8 + lane / 4) * kDims];
#pragma unroll
      for (int j = 0; j < Traits::kTilesPerVector; ++j) {
        const float* from = acc.o[i * Traits::kTilesPerVector + j][tile];
        *reinterpret_cast<float2*>(to + 2 * j) = make_float2(from[c], from[c + 2]);
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void PublishSums(const Accumulator<Traits>& acc,
                                            typename Traits::Shared& shared) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = acc.sum[tile][c];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane / 4 == 0) {
        shared.warps.reference[warp][tile * 8 + lane * 2 + c] = acc.reference[tile][c];
        shared.warps.sum[warp][tile * 8 + lane * 2 + c] = sum;
      }
    }
  }
}

// Adds up the warps' outputs of a tile of 8 packed rows and writes the thread block's, or keeps it
// for its cluster.
template <typename Traits>
__device__ __forceinline__ void StoreTile(const AttentionArgs& args, const WorkItem& item, int tile,
                                          bool of_cluster, typename Traits::Shared& shared) {
  constexpr int kUnits = Traits::kValueDim / 4;  // of a packed row
#pragma unroll 1
  for (int i = threadIdx.x; i < 8 * kUnits; i += Traits::kThreads) {
    const int packed_row = tile * 8 + i / kUnits;
    const int d = i % kUnits * 4;
    if (packed_row >= item.packed_count) continue;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      AddScaled(o, shared.warps.factor[w][packed_row],
                *reinterpret_cast<const float4*>(&shared.o[w][i / kUnits][d]));
    }
    if (of_cluster) {
      *reinterpret_cast<float4*>(&shared.block_o[packed_row][d]) = o;
    } else {
      StorePackedRow<Traits::kValueDim, Traits::kTileRows>(args, item, packed_row, d, o,
                                                           shared.warps.lse2[packed_row]);
    }
  }
}

// Combines what the warps computed for an item and writes it. while_combining() is called when the
// queries' place in shared memory is free and the next item is there.
template <typename Traits, typename WhileCombining>
__device__ __forceinline__ void StoreItem(const AttentionArgs& args, const WorkItem& item,
                                          const ClusterPlace& place, const Accumulator<Traits>& acc,
                                          typename Traits::Shared& shared,
                                          WhileCombining while_combining) {
  const bool of_cluster = place.size > 1;
  PublishSums<Traits>(acc, shared);
  PublishTile<Traits>(acc, 0, shared);
  if constexpr (!Traits::kRings) WaitForCopies();
  // So that who waits for this launch waits for those, too.
  if (args.beside != Beside::kLastLaunch) WaitForLaunchesAhead();
  SyncThreads<Traits::kThreads>();
  while_combining();
  CombineWarps(shared.warps, ValueScale<Traits::kKv>(args, item), /*bias=*/0.0f);
  SyncThreads<Traits::kThreads>();
  StoreTile<Traits>(args, item, 0, of_cluster, shared);
#pragma unroll
  for (int tile = 1; tile < Traits::kRowTiles; ++tile) {
    SyncThreads<Traits::kThreads>();
    PublishTile<Traits>(acc, tile, shared);
    SyncThreads<Traits::kThreads>();
    StoreTile<Traits>(args, item, tile, of_cluster, shared);
  }
}

// Merges an item's output with those of the cluster's other thread blocks and of the job's other
// splits.
template <typename Traits>
__device__ __forceinline__ void MergeItem(const AttentionArgs& args, const WorkItem& item,
                                          const ClusterPlace& place,
                                          typename Traits::Shared& shared) {
  constexpr int kValueDim = Traits::kValueDim;
  constexpr int kTileRows = Traits::kTileRows;
  if (place.size > 1) {
    ArriveAtCluster(place);
    WaitForCluster(place);
    MergeCluster<kValueDim, kTileRows, Traits::kThreads>(
        place, shared.block_o, shared.warps.lse2,
        [&](int packed_row, int d, const PackedRowPart& part) {
          if (packed_row >= item.packed_count) return;
          StorePackedRow<kValueDim, kTileRows>(args, item, packed_row, d, part.o, part.lse2);
        });
    ArriveAtCluster(place);
  }
  if (item.split_count > 1) {
    MergeIfLast<kValueDim, kTileRows, Traits::kThreads>(args, item, place, &shared.is_last,
                                                        [] { SyncThreads<Traits::kThreads>(); });
  }
  WaitForCluster(place);  // the other thread blocks have read block_o
}

}  // namespace tributary::cuda
