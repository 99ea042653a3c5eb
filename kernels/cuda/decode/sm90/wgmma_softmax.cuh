// The softmax of wgmma_attention.cuh: from a tile's products to weights in shared memory, and the
// references that they are taken against.
#pragma once

#include <type_traits>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_state.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

// Reduces, over the eight lanes that hold a tile's rows, the values of a thread's kCount packed
// rows (two of each tile of eight). Each of these lanes is left with kCount / 8 of the packed rows,
// from the one returned on; they are neighbours.
template <int kCount, typename Op>
__device__ __forceinline__ int ReduceRows(float (&x)[kCount], Op op) {
  static_assert(kCount % 8 == 0);
  const int lane = threadIdx.x % 32;
  int first = 0;
  const auto halve = [&]<int kHalf>(std::integral_constant<int, kHalf>, int lane_bit) {
    const bool upper = lane & lane_bit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? x[i] : x[i + kHalf];
      const float keep = upper ? x[i + kHalf] : x[i];
      x[i] = op(keep, __shfl_xor_sync(0xffffffffu, give, lane_bit));
    }
    if (upper) first += kHalf;
  };
  halve(std::integral_constant<int, kCount / 2>{}, 4);
  halve(std::integral_constant<int, kCount / 4>{}, 8);
  halve(std::integral_constant<int, kCount / 8>{}, 16);
  return first / 2 * 8 + lane % 4 * 2 + first % 2;
}

// The first of the two packed rows that a lane holds of a tile of eight.
__device__ __forceinline__ int PackedRowOfTile(int lane, int tile) {
  return tile * 8 + lane % 4 * 2;
}

// What a tile's scores are: raw products, all of them visible or not, or logits, -inf where a
// packed row may not see a slot.
enum class Scores { kDenseProducts, kProducts, kLogits };

template <typename Traits>
__device__ __forceinline__ PackedRowPair& PairOf(const Warpgroup<Traits>& wg, int tile) {
  return wg.shared.pairs[wg.warpgroup][tile * 4 + wg.lane % 4];
}
// The slot of this thread's row lane / 4 of a tile that begins at `strip`.
template <typename Traits>
__device__ __forceinline__ int FirstSlot(const Warpgroup<Traits>& wg, int strip) {
  return (strip + wg.warp) * kStripSlots + TokenOfRow(wg.lane / 4);
}
// Whether the packed row of a tile's element i may see its slot.
template <typename Traits>
__device__ __forceinline__ bool Visible(const Warpgroup<Traits>& wg, int tile, int i,
                                        int first_slot) {
  const RowKeys keys = wg.shared.packed_rows.keys[PackedRowOfTile(wg.lane, tile) + i % 2];
  const int slot = first_slot + i / 2 * 2;
  return slot >= keys.begin && slot < keys.end;
}

// Turns products into logits in base 2, -inf where a packed row may not see a slot.
template <typename Traits>
__device__ __forceinline__ void MakeLogits(Warpgroup<Traits>& wg, const TileRanges& item,
                                           int strip) {
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    const float2 scale = *reinterpret_cast<const float2*>(
        &wg.shared.packed_rows.scale[PackedRowOfTile(wg.lane, tile)]);
#pragma unroll
    for (int i = 0; i < 4; ++i) wg.s[tile * 4 + i] *= i % 2 == 0 ? scale.x : scale.y;
  }
  if (wg.args.soft_cap > 0.0f) CapLogits(wg.args.soft_cap, wg.s);
  if (item.Dense(strip)) return;
  const int slot = FirstSlot(wg, strip);
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!Visible(wg, tile, i, slot)) wg.s[tile * 4 + i] = EmptyLse<float>();
    }
  }
}

// The largest of a tile's logits in every packed row, in shared memory.
template <typename Traits>
__device__ __forceinline__ void FindPeaks(Warpgroup<Traits>& wg) {
  float peaks[Traits::kCells];
#pragma unroll
  for (int i = 0; i < Traits::kCells; ++i) {
    peaks[i] = fmaxf(wg.s[i / 2 * 4 + i % 2], wg.s[i / 2 * 4 + i % 2 + 2]);
  }
  const int packed_row = ReduceRows(peaks, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
  for (int i = 0; i < Traits::kCells / 8; ++i) {
    wg.shared.of_warps[wg.warpgroup * 4 + wg.warp][packed_row + i] = peaks[i];
  }
  SyncWarpgroup(kWarpgroupBarrier + wg.warpgroup);
}

// Takes a tile's weights, of which there are logits by now, out of the sums again.
template <typename Traits>
__device__ __forceinline__ void WithdrawWeights(Warpgroup<Traits>& wg) {
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    const PackedRowPair pair = PairOf(wg, tile);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float withdrawn =
          Exp2(wg.s[tile * 4 + c] + pair.offset[c]) + Exp2(wg.s[tile * 4 + c + 2] + pair.offset[c]);
      float& sum = wg.sum[2 * tile + c];
      // What has overflowed exceeds all that came before it beyond measure.
      sum = sum == INFINITY ? 0.0f : sum - withdrawn;
    }
  }
}

// Brings the sums and O down to references just raised.
template <typename Traits>
__device__ __forceinline__ void ScaleByFactors(Warpgroup<Traits>& wg) {
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    const float2 factors = *reinterpret_cast<const float2*>(
        &wg.shared.factor[wg.warpgroup][PackedRowOfTile(wg.lane, tile)]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = c == 0 ? factors.x : factors.y;
      wg.sum[2 * tile + c] *= factor;
#pragma unroll
      for (int dims = 0; dims < Traits::kDimTiles; ++dims) {
        wg.o[dims][tile * 4 + c] *= factor;
        wg.o[dims][tile * 4 + c + 2] *= factor;
      }
    }
  }
}

// Begins an item: no key has been seen yet. The warpgroup synchronises before it weighs.
template <typename Traits>
__device__ __forceinline__ void BeginItem(Warpgroup<Traits>& wg) {
#pragma unroll
  for (int i = 0; i < Traits::kCells; ++i) wg.sum[i] = 0.0f;
  const int c = threadIdx.x % 128;
  if (c < Traits::kTileRows) {
    wg.shared.reference[wg.warpgroup][c] = kNoReference;
    wg.shared.pairs[wg.warpgroup][c / 2].scale[c % 2] = wg.shared.packed_rows.scale[c];
  }
}

// The weights of the tile, as operand B.
template <typename Traits>
__device__ __forceinline__ uint64_t Weights(const Warpgroup<Traits>& wg) {
  return TileDescriptor(SharedAddress(wg.shared.scratch[wg.warpgroup].p) +
                        wg.parity * (Traits::kTileRows * kTileRowBytes));
}
// Says that this warp's weights are in shared memory, and whether they hold.
template <typename Traits>
__device__ __forceinline__ void PublishWeights(Warpgroup<Traits>& wg, bool exceeded) {
  if (exceeded) wg.shared.exceeded[wg.warpgroup][wg.parity] = 1;
  FenceSharedForWgmma();
  wg.shared.weights_published[wg.warpgroup].Arrive();
}
template <typename Traits>
__device__ __forceinline__ void WaitForWeights(Warpgroup<Traits>& wg) {
  wg.shared.weights_published[wg.warpgroup].Wait(wg.weights_parity);
  wg.weights_parity ^= 1;
}
// Whether a logit of the tile, whose weights have been waited for, outgrew its reference.
template <typename Traits>
__device__ __forceinline__ bool Exceeded(const Warpgroup<Traits>& wg) {
  return wg.shared.exceeded[wg.warpgroup][wg.parity] != 0;
}

// Stores P^T against the references; true when this thread found a logit that outgrew them.
// Keeps the scores: they are needed again then.
template <Scores kScores, typename Traits>
__device__ __forceinline__ bool StoreWeights(Warpgroup<Traits>& wg, int strip) {
  const int slot = FirstSlot(wg, strip);
  const uint32_t p = wg.weights_at + wg.parity * (Traits::kTileRows * kTileRowBytes);
  uint32_t largest = 0;
  // All loads come before the first store: the hardware would keep their order.
  PackedRowPair pairs[Traits::kTiles];
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) pairs[tile] = PairOf(wg, tile);
  uint32_t packed[Traits::kTiles][2];
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = wg.s[tile * 4 + i];
      if (kScores != Scores::kLogits) w[i] *= pairs[tile].scale[i % 2];
    }
    if (kScores == Scores::kProducts && wg.args.soft_cap > 0.0f) CapLogits(wg.args.soft_cap, w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = Exp2(w[i] + pairs[tile].offset[i % 2]);
      if (kScores == Scores::kProducts && !Visible(wg, tile, i, slot)) w[i] = 0.0f;
    }
    wg.sum[2 * tile] += w[0] + w[2];
    wg.sum[2 * tile + 1] += w[1] + w[3];
    packed[tile][0] = Pack<Traits::kCompute>(w[0], w[1]);
    packed[tile][1] = Pack<Traits::kCompute>(w[2], w[3]);
    largest = MaxOfPairs<Traits::kCompute>(
        largest, MaxOfPairs<Traits::kCompute>(packed[tile][0], packed[tile][1]));
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; tile += 2) {
    StoreTransposed(p + tile * 8 * kTileRowBytes, packed[tile][0], packed[tile][1],
                    packed[tile + 1][0], packed[tile + 1][1]);
  }
  // 2^(bias + headroom)
  constexpr uint32_t kLimit = Traits::kCompute == DType::kF16 ? 0x78007800u : 0x43804380u;
  static_assert(kWeightBias + kHeadroom == 15.0f && kHeadroom == 8.0f);
  return AnyGreater(largest, kLimit);
}

// Moves the references up to the largest logits so far, O and the sums with them, and weighs the
// tile, again when it was weighed.
template <typename Traits>
__device__ __forceinline__ void RaiseReferences(Warpgroup<Traits>& wg, const TileRanges& item,
                                                int strip, bool weighed) {
  MakeLogits(wg, item, strip);
  if (weighed) WithdrawWeights(wg);
  FindPeaks(wg);
  const int c = threadIdx.x % 128;
  if (c < Traits::kTileRows) {
    float& reference = wg.shared.reference[wg.warpgroup][c];
    float raised = reference;
#pragma unroll
    for (int w = 0; w < 4; ++w) raised = fmaxf(raised, wg.shared.of_warps[wg.warpgroup * 4 + w][c]);
    wg.shared.factor[wg.warpgroup][c] = Exp2(reference - raised);
    reference = raised;
    wg.shared.pairs[wg.warpgroup][c / 2].offset[c % 2] = Traits::kBias - raised;
  }
  if (c == 0) wg.shared.exceeded[wg.warpgroup][wg.parity] = 0;
  SyncWarpgroup(kWarpgroupBarrier + wg.warpgroup);
  ScaleByFactors(wg);
  PublishWeights(wg, StoreWeights<Scores::kLogits>(wg, strip));
  WaitForWeights(wg);
}

}  // namespace tributary::cuda
