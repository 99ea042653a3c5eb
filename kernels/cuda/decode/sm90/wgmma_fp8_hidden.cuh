// Values that are infinite or NaN and that only some packed rows see, in wgmma_fp8_attention.cuh
// (hidden_values.cuh says why they matter).
//
// Those of the cache are taken out by the widening warps, which leave a note. A computing warpgroup
// that finds one when it has multiplied an item's tiles looks for them in global memory and adds
// them to the rows that see them. Those of a draft block the warpgroup that takes the block finds
// itself.
#pragma once

#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_warpgroup.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"

namespace tributary::cuda {

// What is not finite of dimension d of a slot of a strip of values, else 0.
template <typename Traits>
__device__ __forceinline__ float HiddenValue(const std::byte* values, int slot, int d) {
  if constexpr (OfNvfp4<Traits>) {
    const auto scale = static_cast<uint32_t>(values[Nvfp4ValueScale(slot, d, Traits::kHeadDim)]);
    return NonFiniteOrZero<DType::kFp8E4M3>(scale, 0);
  } else {
    const size_t at =
        ValueOffset(slot / kQuadTokens * kQuadTokens, d, Traits::kHeadDim, /*element_bytes=*/1);
    return NonFiniteOrZero<Traits::kKv>(*reinterpret_cast<const uint32_t*>(values + at),
                                        slot % kQuadTokens);
  }
}

template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::AddHiddenValues(const WorkItem& item,
                                                                      int strip, int apart) {
  const TileRanges ranges(item);
  const StripSource<Traits::kStripBytes, Traits::kStripBytes> source(args_, /*values=*/true);
  const int4 place = {item.page_table, item.kv_head, item.strip_begin, item.strip_end};
  const RowKeys keys[2] = {shared_.packed_rows.keys[packed_row_],
                           shared_.packed_rows.keys[packed_row_ + 8]};
#pragma unroll 1
  for (; strip < item.strip_end; strip += apart) {
    if (ranges.Dense(strip)) continue;
    const int end = min(strip + kTileStrips, item.strip_end) * kStripSlots;
#pragma unroll 1
    for (int slot = strip * kStripSlots; slot < end; ++slot) {
      const bool sees[2] = {Sees(keys[0], slot), Sees(keys[1], slot)};
      if (!sees[0] && !sees[1]) continue;
      const int of_slot = slot / kStripSlots;
      const std::byte* const values = source.At(place, of_slot, source.Page(place, of_slot));
#pragma unroll
      for (int i = 0; i < kOutputs; i += 4) {  // of o_: eight dimensions
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x =
              HiddenValue<Traits>(values, slot % kStripSlots, i * 2 + lane_ % 4 * 2 + c);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (sees[r]) o_[i + 2 * r + c] += x;
          }
        }
      }
    }
  }
}

// Takes what is not finite out of the values of sixteen tokens of a draft block. Returns, to the
// whole warpgroup, whether there was any.
template <typename Traits>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::ConfineDraftStep(int step) const {
  // A thread takes 16 bytes of one of every kAtOnce tokens.
  constexpr int kChunks = 2 * Traits::kHeadDim / 16;
  constexpr int kAtOnce = 128 / kChunks;  // tokens
  static_assert(kAtOnce % 8 == 0);        // chunks are exchanged in eights
  const int thread = threadIdx.x % 128;
  const int chunk = thread % kChunks;
  const int token = step * kDraftTokens + thread / kChunks;
  auto* const at = reinterpret_cast<uint4*>(DraftTileOf<Traits>(shared_).values[chunk / 8] +
                                            SwizzledChunk(token, chunk % 8));
  constexpr int kFurther = kAtOnce * kTileRowBytes / 16;
  constexpr int kEnd = kDraftTokens / kAtOnce * kFurther;
  NonFiniteSearch<DType::kBf16> search;
#pragma unroll
  for (int i = 0; i < kEnd; i += kFurther) search.Look(at[i]);
  const int barrier = kFp8WarpgroupBarrier + warpgroup_;
  if (__builtin_expect(!AnyOfWarpgroup(barrier, search.Found()), 1)) return false;
#pragma unroll
  for (int i = 0; i < kEnd; i += kFurther) at[i] = FiniteOnly<DType::kBf16>(at[i]);
  FenceSharedForWgmma();
  SyncWarpgroup(barrier);
  return true;
}

template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::AddHiddenDraftValues(const WorkItem& item) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed_row = packed_row_ + 8 * r;
    if (packed_row >= item.packed_count) continue;
    const RowKeys seen = args_.block.keys[item.row_begin + QueryRowOf(args_, item, packed_row)];
#pragma unroll 1
    for (int token = seen.begin; token < seen.end; ++token) {
      const auto* const words = reinterpret_cast<const uint32_t*>(
          static_cast<const uint16_t*>(args_.block.v) +
          (size_t(token) * args_.kv_heads + item.kv_head) * Traits::kHeadDim + lane_ % 4 * 2);
#pragma unroll
      for (int i = 0; i < kOutputs; i += 4) {  // of o_: eight dimensions
        const uint32_t pair = words[i];
        o_[i + 2 * r] += NonFiniteOrZero<DType::kBf16>(pair, 0);
        o_[i + 2 * r + 1] += NonFiniteOrZero<DType::kBf16>(pair, 1);
      }
    }
  }
}

}  // namespace tributary::cuda
