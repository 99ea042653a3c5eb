// The warps that widen tiles of K and V of an NVFP4 cache, for wgmma_fp8_attention.cuh.
#pragma once

#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/widen_nvfp4.cuh"

namespace tributary::cuda {

// Widens tiles of K beside copying them, where they are to be widened.
template <typename Traits>
class KeyWidener {
 public:
  __device__ KeyWidener(typename Traits::Shared&, int) {}
  __device__ void Follow(int) {}
  __device__ void Finish() {}
};

// A copying warp, when it has asked for a tile of K or of V, widens half of an earlier tile of K of
// the same computing warpgroup. It does not come to wait for itself: a tile that it copies takes
// the place of one whose values were widened when those two tiles before it had been multiplied,
// and these keys it has widened by then.
template <OfNvfp4 Traits>
class KeyWidener<Traits> {
 public:
  using Shared = typename Traits::Shared;

  __device__ KeyWidener(Shared& shared, int warp)
      : shared_(shared), half_(warp / 2), part_(warp % 2) {}

  // Called when so many tiles have been asked for.
  __device__ __forceinline__ void Follow(int copied) {
    copied_ = copied;
    if (widened_ < copied - kAhead) Widen();
  }
  // Called when all have been.
  __device__ __forceinline__ void Finish() {
    while (widened_ < copied_) Widen();
  }

 private:
  static constexpr int kAhead = 2;  // tiles that are copied ahead
  static_assert(kAhead < Traits::kRawKeyStages && kAhead < Traits::kValueStages);

  // A warp takes two strips. Lanes are dealt to rows and quarters of these so that any eight of
  // them write different banks.
  __device__ __forceinline__ void Widen() {
    const int lane = threadIdx.x % 32;
    shared_.raw_keys_full[half_][raw_keys_.stage].Wait(raw_keys_.parity);
    if (widened_ >= Traits::kKeyStages) {
      shared_.keys_empty[half_][keys_.stage].Wait(keys_.parity ^ 1);
    }
    const int row = lane / 8 % 2 * 4 + lane % 8 / 2;  // and eight further
    const int quarter = lane / 16 * 2 + lane % 2;     // of the dimensions
    const int part = row * 4 + quarter;
    const std::byte* const raw = shared_.raw_keys[half_][raw_keys_.stage];
    std::byte* const wide = shared_.keys[half_][keys_.stage] + quarter / 2 * (64 * kTileRowBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int strip = part_ * 2 + i;
      const std::byte* const from = raw + strip * Traits::kStripStride;
      const uint32_t scales =
          *reinterpret_cast<const uint32_t*>(from + Nvfp4ElementBytes(Traits::kHeadDim) + part * 4);
      const uint32_t of_rows[2] = {WidenE4M3<false>(scales), WidenE4M3<true>(scales)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + half * 512 + part * 16);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        const uint32_t blocks[2] = {FirstTwice(of_rows[half]), SecondTwice(of_rows[half])};
        const int to_row = strip * kStripSlots + half * 8 + row;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          uint32_t pairs[4];
          WidenCodes(words[word], pairs);
#pragma unroll
          for (uint32_t& pair : pairs) pair = MultiplyPairs(pair, blocks[word / 2]);
          *reinterpret_cast<uint4*>(wide + SwizzledChunk(to_row, quarter % 2 * 4 + word)) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
    FenceSharedForWgmma();
    shared_.keys_full[half_][keys_.stage].Arrive();
    shared_.raw_keys_empty[half_][raw_keys_.stage].Arrive();
    raw_keys_.Advance();
    keys_.Advance();
    ++widened_;
  }

  Shared& shared_;
  const int half_;  // of the tiles
  const int part_;  // of a tile
  RingPlace<Traits::kRawKeyStages> raw_keys_;
  RingPlace<Traits::kKeyStages> keys_;
  int copied_ = 0;  // tiles
  int widened_ = 0;
};

// One of four widening warps. Two of them widen the tiles of V of one computing warpgroup.
template <typename Traits>
class Nvfp4ValueWidener {
 public:
  using Shared = typename Traits::Shared;

  __device__ Nvfp4ValueWidener(const ClusterPlace& place, Shared& shared, int warp)
      : shared_(shared), half_(warp / 2), part_(warp % 2), turns_(place, half_) {}

  // Waits until the tiles that this warp has widened so far have been multiplied.
  __device__ __forceinline__ void WaitForEmpty() const {
#pragma unroll 1
    for (int stage = 0; stage < Traits::kWideStages; ++stage) {
      const int uses = (widened_ + Traits::kWideStages - 1 - stage) / Traits::kWideStages;
      if (uses > 0) shared_.wide_empty[half_][stage].Wait((uses - 1) % 2);
    }
  }

  // Widens the values of an item, given by its first 16 bytes. Clears those of slots that no row
  // sees, and those that are not finite and that only some rows see (wgmma_fp8_hidden.cuh).
  __device__ __forceinline__ void WidenItem(int4 item, const SlotRanges& ranges,
                                            DraftPhases& draft) {
    const int lane = Traits::kDraftBlock ? OpaqueLane() : static_cast<int>(threadIdx.x % 32);
    for (int strip = item.z + turns_.first; strip < item.w; strip += turns_.apart) {
      WidenTile(strip, ranges, draft, lane);
    }
  }

 private:
  // A lane takes eight dimensions of a strip. Neighbouring lanes take different strips, and the
  // halves of the eight dimensions in turn, so that any eight of them write different banks.
  __device__ __forceinline__ void WidenTile(int strip, const SlotRanges& ranges, DraftPhases& draft,
                                            int lane) {
    shared_.values_full[half_][from_.stage].Wait(from_.parity);
    if (widened_ >= Traits::kWideStages) {
      shared_.wide_empty[half_][to_.stage].Wait(to_.parity ^ 1);
    }
    if constexpr (Traits::kDraftBlock) {
      if (half_ == 1 && to_.stage == kNvfp4DraftStage) draft.WaitUntilTaken(shared_);
    }
    const int own = lane % 4;  // strip of the tile
    const int eight = part_ * 8 + lane / 4;
    const std::byte* const values = shared_.values[half_][from_.stage] + own * Traits::kStripStride;
    uint32_t lows[4], highs[4];  // scales of a quad's tokens
    ReadScales(values, strip, own, eight, ranges, lows, highs);
    std::byte* const wide = shared_.wide[half_][to_.stage];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dims = (i ^ eight % 2) * 4;  // of the eight
      uint2 words[4];
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        words[quad] =
            *reinterpret_cast<const uint2*>(values + (eight * 4 + quad) * kVectorBytes + dims * 2);
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t a[4][4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
          uint32_t pairs[4];
          WidenCodes(pair == 0 ? words[quad].x : words[quad].y, pairs);
          a[0][quad] = MultiplyPairs(pairs[0], lows[quad]);
          a[1][quad] = MultiplyPairs(pairs[1], highs[quad]);
          a[2][quad] = MultiplyPairs(pairs[2], lows[quad]);
          a[3][quad] = MultiplyPairs(pairs[3], highs[quad]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = eight * 8 + dims + pair * 2 + j / 2;
          *reinterpret_cast<uint4*>(wide + SwizzledChunk(row, j % 2 * 4 + own)) =
              make_uint4(a[j][0], a[j][1], a[j][2], a[j][3]);
        }
      }
    }
    FenceSharedForWgmma();
    shared_.wide_full[half_][to_.stage].Arrive();
    shared_.values_empty[half_][from_.stage].Arrive();
    from_.Advance();
    to_.Advance();
    ++widened_;
  }

  // The scales of sixteen tokens of a block. Slots that no row sees have none. What is not finite
  // and hidden from some rows is taken out, and the warpgroup that computes is told so, if a row
  // sees it.
  __device__ __forceinline__ void ReadScales(const std::byte* values, int strip, int own, int eight,
                                             const SlotRanges& ranges, uint32_t (&lows)[4],
                                             uint32_t (&highs)[4]) const {
    const uint4 x = *reinterpret_cast<const uint4*>(values + Nvfp4ElementBytes(Traits::kHeadDim) +
                                                    eight / 2 * kStripSlots);
    uint32_t scales[4] = {x.x, x.y, x.z, x.w};
    if (!SeesTile(ranges, strip * kStripSlots)) {
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        uint32_t(&word)[1] = reinterpret_cast<uint32_t(&)[1]>(scales[quad]);
        KeepTokens<DType::kFp8E4M3>(
            word, AliveTokens(ranges, (strip + own) * kStripSlots + quad * kQuadTokens));
      }
    }
    if (!ranges.Dense(strip) && RowsDiffer(ranges)) {
      uint32_t found = 0;
#pragma unroll
      for (uint32_t& word : scales) {
        const uint32_t mask = NonFiniteMask<DType::kFp8E4M3>(word);
        found |= mask;
        word &= ~mask;
      }
      if (found != 0) shared_.values_hidden[half_] = 1;
    }
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      lows[quad] = WidenE4M3<false>(scales[quad]);
      highs[quad] = WidenE4M3<true>(scales[quad]);
    }
  }

  Shared& shared_;
  const int half_;  // of the tiles
  const int part_;  // of a tile
  const TileTurns turns_;
  RingPlace<Traits::kValueStages> from_;
  RingPlace<Traits::kWideStages> to_;
  int widened_ = 0;  // tiles
};

}  // namespace tributary::cuda
