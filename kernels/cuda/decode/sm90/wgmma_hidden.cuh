// Values that are infinite or NaN and that only some packed rows see, in wgmma_attention.cuh
// (hidden_values.cuh says why they matter). A warp takes them out of the tiles that it multiplies
// (wgmma_operands.cuh), and adds them at the end of the item, from global memory.
#pragma once

#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_operands.cuh"
#include "kernels/cuda/decode/sm90/wgmma_state.cuh"

namespace tributary::cuda {

// What is not finite of dimensions d and d + 1 of a slot of a strip of values, else 0. The words
// are those that ReadValueWords reads: two dimensions of four slots.
template <typename Traits>
requires(!OfNvfp4<Traits>) __device__ __forceinline__
    void FindHiddenValues(const std::byte* values, int slot, int d, float (&x)[2]) {
  const auto* const words = reinterpret_cast<const uint32_t*>(
      values +
      ValueOffset(slot / kQuadTokens * kQuadTokens, d, Traits::kValueDim, Traits::kElementBytes));
  constexpr int kWords = Traits::kElementBytes;      // of a dimension's four slots
  constexpr int kSlots = 4 / Traits::kElementBytes;  // of a word
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = NonFiniteOrZero<Traits::kKv>(words[i * kWords + slot % kQuadTokens / kSlots],
                                        slot % kSlots);
  }
}
template <OfNvfp4 Traits>
__device__ __forceinline__ void FindHiddenValues(const std::byte* values, int slot, int d,
                                                 float (&x)[2]) {
  const auto scale = static_cast<uint32_t>(values[Nvfp4ValueScale(slot, d, Traits::kValueDim)]);
  x[0] = x[1] = NonFiniteOrZero<DType::kFp8E4M3>(scale, 0);
}

// Adds what was taken out of the item's tiles, the one that begins with strip `strip` and those
// that follow `apart` strips apart, to the packed rows that see it: without its weight, which
// changes nothing.
template <typename Traits>
__device__ __forceinline__ void AddHiddenValues(Warpgroup<Traits>& wg, const WorkItem& item,
                                                int strip, int apart) {
  const TileRanges ranges(item);
  const StripSource<Traits::kKeyStripBytes, Traits::kValueStripBytes> source(wg.args,
                                                                             /*values=*/true);
  const int4 place = {item.page_table, item.kv_head, item.strip_begin, item.strip_end};
#pragma unroll 1
  for (; strip < item.strip_end; strip += apart) {
    const int end = min(strip + kTileStrips, item.strip_end) * kStripSlots;
#pragma unroll 1
    for (int slot = strip * kStripSlots; slot < end; ++slot) {
      const int of_slot = slot / kStripSlots;
      if (ranges.DenseStrip(of_slot)) continue;
      const std::byte* const values = source.At(place, of_slot, source.Page(place, of_slot));
#pragma unroll
      for (int dims = 0; dims < Traits::kDimTiles; ++dims) {
        const int d = DimsOfTile<Traits>(dims);
        if (Traits::kDimsPadded && d >= Traits::kValueDim) continue;
        float x[2];
        FindHiddenValues<Traits>(values, slot % kStripSlots, d, x);
        if (x[0] == 0.0f && x[1] == 0.0f) continue;
#pragma unroll
        for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (!Sees(wg.shared.packed_rows.keys[PackedRowOfTile(wg.lane, tile) + c], slot)) {
              continue;
            }
            wg.o[dims][tile * 4 + c] += x[0];
            wg.o[dims][tile * 4 + c + 2] += x[1];
          }
        }
      }
    }
  }
}

}  // namespace tributary::cuda
