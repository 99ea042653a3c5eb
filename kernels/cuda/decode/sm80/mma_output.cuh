// How the thread blocks of mma_attention combine, store and merge what their warps computed.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/cluster_merge.cuh"
#include "kernels/cuda/decode/cut_job.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm80/mma_products.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/decode/sm80/warp_results.cuh"
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
        shared.warps.reference[tile * 8 + lane * 2 + c][warp] = acc.reference[tile][c];
        shared.warps.sum[tile * 8 + lane * 2 + c][warp] = sum;
      }
    }
  }
}

// Adds up the warps' outputs of a tile of 8 packed rows and writes the thread block's, or sends it
// to its cluster.
template <typename Traits>
__device__ __forceinline__ void StoreTile(const AttentionArgs& args, const WorkItem& item, int tile,
                                          const ClusterPlace& place, float v_scale,
                                          typename Traits::Shared& shared) {
  constexpr int kUnits = Traits::kValueDim / 4;  // of a packed row
#pragma unroll 1
  for (int i = threadIdx.x; i < 8 * kUnits; i += Traits::kThreads) {
    const int packed_row = tile * 8 + i / kUnits;
    const int d = i % kUnits * 4;
    if (packed_row >= item.packed_count) continue;
    const WarpFactors<Traits::kWarps> factors(shared.warps, packed_row, v_scale);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      AddScaled(o, factors.of_warp[w],
                *reinterpret_cast<const float4*>(&shared.o[w][i / kUnits][d]));
    }
    if (place.size > 1) {
      shared.inbox.Send(place, packed_row, d, o, factors.lse2);
    } else {
      StorePackedRow<Traits::kValueDim, Traits::kTileRows>(args, item, packed_row, d, o,
                                                           factors.lse2);
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
  const float v_scale = ValueScale<Traits::kKv>(args, item);  // in flight until the warps have met
  PublishSums<Traits>(acc, shared);
  PublishTile<Traits>(acc, 0, shared);
  if constexpr (!Traits::kRings) WaitForCopies();
  // So that who waits for this launch waits for those, too.
  if (args.beside != Beside::kLastLaunch) WaitForLaunchesAhead();
  if (place.size > 1) {
    if (threadIdx.x == 0) shared.inbox.Expect(place, item.packed_count);
    WaitForCluster(place);  // all inboxes are free
  }
  SyncThreads<Traits::kThreads>();
  while_combining();
  StoreTile<Traits>(args, item, 0, place, v_scale, shared);
#pragma unroll
  for (int tile = 1; tile < Traits::kRowTiles; ++tile) {
    SyncThreads<Traits::kThreads>();
    PublishTile<Traits>(acc, tile, shared);
    SyncThreads<Traits::kThreads>();
    StoreTile<Traits>(args, item, tile, place, v_scale, shared);
  }
}

// Merges an item's output with those of the cluster's other thread blocks and of the job's other
// splits.
template <typename Traits>
__device__ __forceinline__ void MergeItem(const AttentionArgs& args, const WorkItem& item,
                                          const ClusterPlace& place, uint32_t parity,
                                          typename Traits::Shared& shared) {
  constexpr int kValueDim = Traits::kValueDim;
  constexpr int kTileRows = Traits::kTileRows;
  if (place.size > 1) {
    shared.inbox.template Merge<Traits::kThreads>(
        place, parity, [&](int packed_row, int d, const PackedRowPart& part) {
          if (packed_row >= item.packed_count) return;
          StorePackedRow<kValueDim, kTileRows>(args, item, packed_row, d, part.o, part.lse2);
        });
    // (Behind the last item nobody sends: a block ends when all that is meant for it has come.)
    if (item.next >= 0) ArriveAtCluster(place);
  }
  if (item.split_count > 1) {
    MergeIfLast<kValueDim, kTileRows, Traits::kThreads>(args, item, place, &shared.is_last,
                                                        [] { SyncThreads<Traits::kThreads>(); });
  }
}

}  // namespace tributary::cuda
