// Which tiles of 64 tokens a warpgroup of a thread block takes, and where in the cache their strips
// lie. Both kernels of warpgroups deal tiles out like this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

inline constexpr int kTileStrips = 4;  // of 16 tokens, that a warpgroup takes at a time
inline constexpr int kTilesOfLanes = 32 / kTileStrips;  // whose strips a warp's lanes take one each
inline constexpr int kComputeWarpgroups = 2;            // a block's tiles are dealt to them in turn

// What some row of the block sees, and what every row sees. Slots that no row sees may hold
// anything, NaN included, and 0 * NaN is NaN.
struct SlotRanges {
  int key_begin, key_end;
  int dense_begin, dense_end;

  // Whether every row of the block may see every slot of the tile that begins with this strip.
  __device__ __forceinline__ bool Dense(int strip) const {
    const int first = strip * kStripSlots;
    return first >= dense_begin && first + kTileStrips * kStripSlots <= dense_end;
  }
  // The same of one strip.
  __device__ __forceinline__ bool DenseStrip(int strip) const {
    const int first = strip * kStripSlots;
    return first >= dense_begin && first + kStripSlots <= dense_end;
  }
};

// What of an item its tiles need, kept in registers.
struct TileRanges : SlotRanges {
  int strip_end;

  __device__ explicit TileRanges(const WorkItem& item)
      : SlotRanges{item.key_begin, item.key_end, item.dense_begin, item.dense_end},
        strip_end(item.strip_end) {}
};

// Whether some row sees each slot of the tile that begins with slot `first`.
template <typename Ranges>
__device__ __forceinline__ bool SeesTile(const Ranges& ranges, int first) {
  return first >= ranges.key_begin && first + kTileStrips * kStripSlots <= ranges.key_end;
}

// The tiles of an item that fall to one warpgroup of a block: the cluster's blocks take tiles in
// turn, and so do a block's warpgroups.
struct TileTurns {
  int first;  // in strips from the item's first
  int apart;  // strips from one tile to the next

  __device__ TileTurns(const ClusterPlace& place, int warpgroup)
      : first((static_cast<int>(place.rank) + warpgroup * static_cast<int>(place.size)) *
              kTileStrips),
        apart(kComputeWarpgroups * static_cast<int>(place.size) * kTileStrips) {}
};

// Whether any tile of an item's strips falls to this block of a cluster.
__device__ __forceinline__ bool HasTiles(int strip_begin, int strip_end,
                                         const ClusterPlace& place) {
  return strip_begin + static_cast<int>(place.rank) * kTileStrips < strip_end;
}

// Where the strips of K or of V of items lie: strips of K have kKeyStripBytes, those of V
// kValueStripBytes. An item is given by its first 16 bytes.
template <int kKeyStripBytes, int kValueStripBytes>
class StripSource {
 public:
  __device__ StripSource(const AttentionArgs& args, bool values)
      : args_(args), values_(values), shift_(args.page_shift - 4) {}

  __device__ __forceinline__ int Page(int4 item, int strip) const {
    return __ldg(args_.page_tables + item.x + (strip >> shift_));
  }
  __device__ __forceinline__ const std::byte* At(int4 item, int strip, int page) const {
    if constexpr (kKeyStripBytes == kValueStripBytes) {
      const size_t plane = size_t(kKeyStripBytes) << shift_;
      const size_t head = item.y + (values_ ? args_.kv_heads : 0);
      return args_.cache + (size_t(page) * 2 * args_.kv_heads + head) * plane +
             size_t(strip & ((1 << shift_) - 1)) * kKeyStripBytes;
    } else {
      const size_t page_strips = size_t(page) * args_.kv_heads << shift_;
      const size_t head_strips = size_t(item.y) << shift_;
      const size_t keys_of_page = (size_t(args_.kv_heads) << shift_) * kKeyStripBytes;
      return args_.cache + page_strips * (kKeyStripBytes + kValueStripBytes) +
             (values_ ? keys_of_page : 0) +
             (head_strips + (strip & ((1 << shift_) - 1))) *
                 size_t(values_ ? kValueStripBytes : kKeyStripBytes);
    }
  }
  // By a warp, a lane to a strip: the pages of kTilesOfLanes tiles, from the one that begins with
  // `strip` on.
  __device__ __forceinline__ int Pages(int4 item, int strip, const TileTurns& turns) const {
    const int of_lane = StripOfLane(strip, turns);
    return of_lane < item.w ? Page(item, of_lane) : 0;
  }
  // By a warp: asks L2 for an item's first `tiles` tiles, of these pages. (Line by line: a warp
  // begins bulk operations one after the other, and copying waits for this.)
  __device__ __forceinline__ void Prefetch(int4 item, const TileTurns& turns, int pages,
                                           int tiles) const {
    constexpr int kLine = 128;
    // Of the larger strips; each of the others leaves out what it lacks.
    constexpr int kLines = (std::max(kKeyStripBytes, kValueStripBytes) + kLine - 1) / kLine;
    // (Rounded up only where it must be: the number of tiles may not be known to the compiler.)
    constexpr int kRoundUp = kTileStrips * kLines % 32 == 0 ? 0 : 31;
    const int lane = threadIdx.x % 32;
    const int strip = StripOfLane(item.z + turns.first, turns);
    const auto of_lane =
        reinterpret_cast<uint64_t>(strip < item.w ? At(item, strip, pages) : nullptr);
#pragma unroll 4
    for (int i = 0; i < (tiles * kTileStrips * kLines + kRoundUp) / 32; ++i) {
      const int line = i * 32 + lane;
      const uint64_t at = __shfl_sync(0xffffffffu, of_lane, line / kLines);
      const int byte = line % kLines * kLine;
      const bool there = kKeyStripBytes == kValueStripBytes ||
                         byte < (values_ ? kValueStripBytes : kKeyStripBytes);
      if (at != 0 && there) PrefetchToL2(reinterpret_cast<const std::byte*>(at) + byte);
    }
  }

 private:
  // Of kTilesOfLanes tiles from the one that begins with `strip` on.
  static __device__ __forceinline__ int StripOfLane(int strip, const TileTurns& turns) {
    const int lane = threadIdx.x % 32;
    return strip + lane / kTileStrips * turns.apart + lane % kTileStrips;
  }

  const AttentionArgs& args_;
  const bool values_;
  const int shift_;
};

}  // namespace tributary::cuda
