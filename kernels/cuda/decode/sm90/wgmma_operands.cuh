// Tiles of K and V as a computing warpgroup of wgmma_attention.cuh takes them: from its ring into
// registers, widened there, as operand A of warpgroup products.
#pragma once

#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/wgmma_state.cuh"
#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/ptx/widen.cuh"
#include "kernels/cuda/ptx/widen_nvfp4.cuh"

namespace tributary::cuda {

// The two neighbouring dimensions that a thread's rows lane / 4 and lane / 4 + 8 of a tile of 64
// dimensions stand for: the first of them. Its words of V are where page_layout.h puts these. Of
// eight bits two tiles share a thread's vectors, which have four dimensions each; where the last
// tile has no other to share with, two warps do.
template <typename Traits>
requires(!OfNvfp4<Traits>) __device__ __forceinline__ int DimsOfTile(int tile) {
  const int lane_row = threadIdx.x % 32 / 4;
  const int warp = threadIdx.x / 32 % 4;
  if constexpr (Traits::kElementBytes == 2) return 16 * (4 * tile + warp) + 2 * lane_row;
  if constexpr (Traits::kDimTiles == 1) return 32 * (warp / 2) + 4 * lane_row + 2 * (warp % 2);
  if (Traits::kDimTiles % 2 == 1 && tile == Traits::kDimTiles - 1) {
    return 64 * tile + 32 * (warp / 2) + 4 * lane_row + 2 * (warp % 2);
  }
  return 32 * (4 * (tile / 2) + warp) + 4 * lane_row + 2 * (tile % 2);
}

template <OfNvfp4 Traits>
__device__ __forceinline__ int DimsOfTile(int tile) {
  return 64 * tile + 16 * (threadIdx.x / 32 % 4) + 2 * (threadIdx.x % 32 / 4);
}

// Where a thread's vector of V of a tile of dimensions lies in a strip of 16 tokens. Beyond the
// last dimension it is the last vector's: what comes of it is not stored.
template <typename Traits>
__device__ __forceinline__ size_t ValuesOfTile(int tile) {
  int d = DimsOfTile<Traits>(tile);
  if constexpr (Traits::kDimsPadded) {
    d = min(d, Traits::kValueDim - ValueVectorDims(Traits::kElementBytes));
  }
  return ValueOffset(threadIdx.x % 4 * kQuadTokens, d, Traits::kValueDim, Traits::kElementBytes);
}

// A thread's words of V of one strip of 16 tokens.
template <typename Traits>
requires(!OfNvfp4<Traits>) __device__ __forceinline__
    void ReadValueWords(const std::byte* strip,
                        uint32_t (&words)[Traits::kDimTiles][Traits::kValueWords]) {
  constexpr int kTilesOfVector = kVectorBytes / (4 * Traits::kValueWords);
#pragma unroll
  for (int tile = 0; tile < Traits::kDimTiles; tile += kTilesOfVector) {
    const std::byte* at = strip + ValuesOfTile<Traits>(tile);
    if (tile + kTilesOfVector <= Traits::kDimTiles) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      const uint32_t of_vector[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of_tile = min(tile + i / Traits::kValueWords, Traits::kDimTiles - 1);
        words[of_tile][i % Traits::kValueWords] = of_vector[i];
      }
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      words[tile][0] = x.x, words[tile][1] = x.y;
    }
  }
}

// Of NVFP4 a word of codes and one of the tokens' scales. Beyond the last dimension these are the
// last block's.
template <OfNvfp4 Traits>
__device__ __forceinline__ void ReadValueWords(
    const std::byte* strip, uint32_t (&words)[Traits::kDimTiles][Traits::kValueWords]) {
#pragma unroll
  for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
    int d = DimsOfTile<Traits>(tile);
    if (Traits::kDimsPadded) d = min(d, Traits::kValueDim - 2);
    const int token = threadIdx.x % 4 * kQuadTokens;
    words[tile][0] =
        *reinterpret_cast<const uint32_t*>(strip + Nvfp4ValueWord(token, d, Traits::kValueDim));
    words[tile][1] =
        *reinterpret_cast<const uint32_t*>(strip + Nvfp4ValueScale(token, d, Traits::kValueDim));
  }
}

// Two dimensions of four tokens as operand A of one step.
template <typename Traits>
__device__ __forceinline__ void WidenValueWords(const uint32_t (&words)[Traits::kValueWords],
                                                uint32_t (&a)[4]) {
  if constexpr (OfNvfp4<Traits>) {
    WidenValueWord(words[0], words[1], a);
  } else if constexpr (Traits::kElementBytes == 1) {
    const uint4 vector = make_uint4(words[0], words[1], 0, 0);
    WidenQuad<Traits::kKv>(vector, 0, a[0], a[2]);
    WidenQuad<Traits::kKv>(vector, 1, a[1], a[3]);
  } else {
    a[0] = words[0];
    a[2] = words[1];
    a[1] = words[2];
    a[3] = words[3];
  }
}

// Wait until the next tile has come; say that this thread has read it.
template <typename Traits>
__device__ __forceinline__ const std::byte* WaitForStage(const Warpgroup<Traits>& wg) {
  wg.shared.full[wg.warpgroup][wg.place.stage].Wait(wg.place.parity);
  return wg.shared.stages[wg.warpgroup][wg.place.stage];
}
template <typename Traits>
__device__ __forceinline__ void LeaveStage(Warpgroup<Traits>& wg) {
  wg.shared.empty[wg.warpgroup][wg.place.stage].Arrive();
  wg.place.Advance();
}

// Takes what is not finite out of this warp's values of a tile, in strips that some packed rows see
// and others do not. Returns whether there was any.
template <typename Traits>
__device__ __forceinline__ bool KeepFiniteValues(Warpgroup<Traits>& wg, const TileRanges& item,
                                                 int first_strip) {
  constexpr int kFirst = OfNvfp4<Traits> ? 1 : 0;  // codes are finite, their scales may not be
  constexpr DType kType = OfNvfp4<Traits> ? DType::kFp8E4M3 : Traits::kKv;
  NonFiniteSearch<kType> search;
#pragma unroll
  for (int i = 0; i < kTileStrips; ++i) {
    if (item.DenseStrip(first_strip + i)) continue;
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
      for (int word = kFirst; word < Traits::kValueWords; ++word) {
        search.Look(wg.v[i][tile][word], word);
      }
    }
  }
  if (__builtin_expect(!__any_sync(0xffffffffu, search.Found()), 1)) return false;
#pragma unroll
  for (int i = 0; i < kTileStrips; ++i) {
    if (item.DenseStrip(first_strip + i)) continue;
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
#pragma unroll
      for (int word = kFirst; word < Traits::kValueWords; ++word) {
        wg.v[i][tile][word] &= ~NonFiniteMask<kType>(wg.v[i][tile][word]);
      }
    }
  }
  return true;
}

// Bring K and V of the next tile into registers, when they are there. Of V, the tile that begins
// with `first_strip`, slots that no row sees are cleared, and values that are not finite where only
// some rows see them (wgmma_hidden.cuh): returns whether there were such.
template <typename Traits>
__device__ __forceinline__ void ReadKeys(Warpgroup<Traits>& wg) {
  const std::byte* const keys = WaitForStage(wg) + wg.warp * Traits::kKeyStripBytes;
  const std::byte* at =
      keys + wg.lane / 4 * kKeyPanelBytes + KeyChunk(wg.lane / 4, wg.lane % 4) * kVectorBytes;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
    const auto* low = reinterpret_cast<const uint4*>(at + panel * kStripSlots * kKeyPanelBytes);
    wg.k.panels[panel][0] = *low;
    wg.k.panels[panel][1] = low[8 * kKeyPanelBytes / kVectorBytes];
  }
  if constexpr (Traits::kHasTail) {
    wg.k.tail = *reinterpret_cast<const uint4*>(
        keys + Traits::kPanels * kStripSlots * kKeyPanelBytes + wg.lane * kVectorBytes);
  }
  LeaveStage(wg);
}
template <OfNvfp4 Traits>
__device__ __forceinline__ void ReadKeys(Warpgroup<Traits>& wg) {
  wg.k.Read(WaitForStage(wg) + wg.warp * Traits::kKeyStripBytes,
            []<typename T>(const std::byte* at, T& x) { x = *reinterpret_cast<const T*>(at); });
  LeaveStage(wg);
}
template <typename Traits>
__device__ __forceinline__ bool ReadValues(Warpgroup<Traits>& wg, const TileRanges& item,
                                           int first_strip) {
  const int first = first_strip * kStripSlots;
  const bool whole = SeesTile(item, first);
  const std::byte* v = WaitForStage(wg);
#pragma unroll
  for (int i = 0; i < kTileStrips; ++i) {
    ReadValueWords<Traits>(v + i * Traits::kValueStripBytes, wg.v[i]);
  }
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kTileStrips; ++i) {
      const uint32_t alive = AliveTokens(item, first + i * kStripSlots + wg.lane % 4 * kQuadTokens);
#pragma unroll
      for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
        if constexpr (OfNvfp4<Traits>) {
          uint32_t(&scales)[1] = reinterpret_cast<uint32_t(&)[1]>(wg.v[i][tile][1]);
          KeepTokens<DType::kFp8E4M3>(scales, alive);
        } else {
          KeepTokens<Traits::kKv>(wg.v[i][tile], alive);
        }
      }
    }
  }
  bool hidden = false;
  if (!item.Dense(first_strip) && RowsDiffer(item)) {
    hidden = KeepFiniteValues(wg, item, first_strip);
  }
  LeaveStage(wg);
  return hidden;
}

// The tile's K and V as operand A.
template <typename Traits>
__device__ __forceinline__ void WidenKeys(const Warpgroup<Traits>& wg,
                                          uint32_t (&a)[Traits::kKeySteps][4]) {
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
#pragma unroll
    for (int quad = 0; quad < Traits::kQuadsPerVector; ++quad) {
      uint32_t(&step)[4] = a[panel * Traits::kQuadsPerVector + quad];
      WidenQuad<Traits::kKv>(wg.k.panels[panel][0], quad, step[0], step[2]);
      WidenQuad<Traits::kKv>(wg.k.panels[panel][1], quad, step[1], step[3]);
    }
  }
  // A vector of the tail has one half for each of the two rows.
#pragma unroll
  for (int quad = 0; quad < Traits::kTailSteps; ++quad) {
    uint32_t(&step)[4] = a[Traits::kPanels * Traits::kQuadsPerVector + quad];
    WidenQuad<Traits::kKv>(wg.k.tail, quad, step[0], step[2]);
    WidenQuad<Traits::kKv>(wg.k.tail, Traits::kTailSteps + quad, step[1], step[3]);
  }
}
template <OfNvfp4 Traits>
__device__ __forceinline__ void WidenKeys(const Warpgroup<Traits>& wg,
                                          uint32_t (&a)[Traits::kKeySteps][4]) {
#pragma unroll
  for (int step = 0; step < Traits::kKeySteps; step += 2) {
    uint32_t of_step[2][4];
    wg.k.Widen(step / 2, of_step);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (step + i == Traits::kKeySteps) break;
#pragma unroll
      for (int word = 0; word < 4; ++word) a[step + i][word] = of_step[i][word];
    }
  }
}
template <typename Traits>
__device__ __forceinline__ void WidenValues(const Warpgroup<Traits>& wg,
                                            uint32_t (&a)[kTileStrips][Traits::kDimTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTileStrips; ++i) {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; ++tile) {
      WidenValueWords<Traits>(wg.v[i][tile], a[i][tile]);
    }
  }
}

}  // namespace tributary::cuda
