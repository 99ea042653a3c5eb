// What a computing warpgroup of wgmma_attention.cuh does with the tiles of an item.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_hidden.cuh"
#include "kernels/cuda/decode/sm90/wgmma_operands.cuh"
#include "kernels/cuda/decode/sm90/wgmma_softmax.cuh"
#include "kernels/cuda/decode/sm90/wgmma_state.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace tributary::cuda {

// Starts S^T of a tile, as raw products.
template <typename Traits>
__device__ __forceinline__ void MultiplyKeys(Warpgroup<Traits>& wg,
                                             const uint32_t (&a)[Traits::kKeySteps][4]) {
#pragma unroll
  for (int step = 0; step < Traits::kKeySteps; ++step) {
    const uint64_t tile = TileDescriptor(SharedAddress(wg.shared.q[step * 16 / kTileSlots]));
    Wgmma<Traits::kCompute, Traits::kTileRows>(
        wg.s, a[step], DescriptorOfStep(tile, step % (kTileSlots / 16)), step > 0);
  }
}
// Starts O^T += V^T P^T.
template <typename Traits>
__device__ __forceinline__ void MultiplyValues(
    Warpgroup<Traits>& wg, const uint32_t (&a)[kTileStrips][Traits::kDimTiles][4]) {
  const uint64_t p = Weights(wg);
#pragma unroll
  for (int i = 0; i < kTileStrips; ++i) {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
      Wgmma<Traits::kCompute, Traits::kTileRows>(wg.o[tile], a[i][tile], DescriptorOfStep(p, i),
                                                 true);
    }
  }
}

// Stores a tile's weights; true when they do not hold. What enters the next products is widened
// between the slow instructions.
template <typename Traits>
__device__ __forceinline__ bool StoreWeights(Warpgroup<Traits>& wg, const TileRanges& item,
                                             int strip, uint32_t (&keys)[Traits::kKeySteps][4]) {
  bool exceeded;
  if (wg.args.soft_cap == 0.0f && item.Dense(strip)) {
    exceeded = StoreWeights<Scores::kDenseProducts>(wg, strip);
    if (Traits::kTogether) WidenKeys(wg, keys);
  } else {
    exceeded = StoreWeights<Scores::kProducts>(wg, strip);
    if (Traits::kTogether) WidenKeys(wg, keys);
  }
  return exceeded;
}

// There is at least one tile. Returns whether values have been taken out of this warp's tiles.
template <typename Traits>
__device__ __forceinline__ bool AddSomeTiles(Warpgroup<Traits>& wg, const TileRanges& ranges,
                                             int strip, int apart) {
  uint32_t keys[Traits::kKeySteps][4];
  uint32_t values[kTileStrips][Traits::kDimTiles][4];
  ReadKeys(wg);
  WidenKeys(wg, keys);
  FenceRegisters(keys);
  WgmmaFence();
  MultiplyKeys(wg, keys);
  WgmmaCommit();
  SyncWarpgroup(kWarpgroupBarrier + wg.warpgroup);  // the references
  WgmmaWait();
  FenceRegisters(wg.s);
  bool more = strip + apart < ranges.strip_end;
  bool hidden = ReadValues(wg, ranges, strip);
  WidenValues(wg, values);
  if (Traits::kTogether) {
    if (more) ReadKeys(wg);
    WidenKeys(wg, keys);
  }
  // The first tile is weighed where the references are raised, the others behind their products.
  for (bool weighed = false;; weighed = true) {
    if (weighed) WaitForWeights(wg);
    if (!weighed || Exceeded(wg)) RaiseReferences(wg, ranges, strip, weighed);
    if (Traits::kTogether) FenceRegisters(keys);
    FenceRegisters(values);
    if (!more) break;
    strip += apart;
    more = strip + apart < ranges.strip_end;
    WgmmaFence();
    MultiplyValues(wg, values);
    if (!Traits::kTogether) {
      WgmmaCommit();
      WgmmaWait();
      FenceRegisters(wg.o);
      ReadKeys(wg);
      WidenKeys(wg, keys);
      FenceRegisters(keys);
      WgmmaFence();
    }
    MultiplyKeys(wg, keys);
    WgmmaCommit();
    WgmmaWait();
    FenceRegisters(wg.s);
    FenceRegisters(wg.o);
    hidden |= ReadValues(wg, ranges, strip);
    if (Traits::kTogether && more) ReadKeys(wg);
    wg.parity ^= 1;
    PublishWeights(wg, StoreWeights(wg, ranges, strip, keys));
    WidenValues(wg, values);
    FenceRegisters(values);
  }
  WgmmaFence();
  MultiplyValues(wg, values);
  WgmmaCommit();
  WgmmaWait();
  FenceRegisters(wg.o);
  wg.parity ^= 1;
  return hidden;
}

// Adds the tiles of an item that fall to this warpgroup: from `strip`, `apart` strips apart.
template <typename Traits>
__device__ __forceinline__ void AddTiles(Warpgroup<Traits>& wg, const WorkItem& item, int strip,
                                         int apart) {
#pragma unroll
  for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < Traits::kTileRows / 2; ++i) wg.o[tile][i] = 0.0f;
  }
  BeginItem(wg);
  const TileRanges ranges(item);
  if (strip >= ranges.strip_end) return;
  const bool hidden = AddSomeTiles(wg, ranges, strip, apart);
  if (__builtin_expect(hidden, 0)) AddHiddenValues(wg, item, strip, apart);
}

}  // namespace tributary::cuda
