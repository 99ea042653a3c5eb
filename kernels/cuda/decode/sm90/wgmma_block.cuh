// What the two kernels of warpgroups have in common: how a block's tiles of 64 tokens are dealt out
// and where they lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

inline constexpr int kTileGroups = 4;  // of 16 tokens, that a warpgroup takes at a time
inline constexpr int kTilesOfLanes = 32 / kTileGroups;  // whose groups a warp's lanes take one each
inline constexpr int kComputeWarpgroups = 2;            // a block's tiles are dealt to them in turn

// What a block asks memory for at once: enough to keep it busy (with half of it, calls take a tenth
// longer). More would stand in queues, which serve multiprocessors so unequally that with 160 KB
// one was done with its share when another had two thirds of it.
inline constexpr int kBytesUnderWay = 64 * 1024;

// Zero, and the same in all lanes for all that the compiler knows. What is found from an address
// with it stays in uniform registers. Without it the compiler keeps the address of shared memory in
// each lane, as branches around the copies of queries need it, and every product of the loop waits
// for its descriptor to be brought from there.
__device__ __forceinline__ uint32_t UniformZero() {
  uint32_t zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return __shfl_sync(0xffffffffu, zero, 0);
}

// The lane, not known to the compiler before: what is found from it takes no registers ahead of
// this.
__device__ __forceinline__ int OpaqueLane() {
  return static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32));
}

// A value, kept in a register: the compiler would rather find it again in every turn of a loop.
__device__ __forceinline__ uint32_t Kept(uint32_t x) {
  asm volatile("mov.u32 %0, %0;" : "+r"(x));
  return x;
}

// A place in a ring.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The place `places` before this one, no more than the ring has.
  __device__ __forceinline__ RingPlace Before(int places) const {
    const bool wraps = stage < places;
    return {stage - places + (wraps ? kStages : 0), parity ^ (wraps ? 1 : 0)};
  }
};

// The stages of a ring that has room for `most`, and two warps to fill them in turn, each of which
// waits until the tile `under_way` places before its own has come. It must not miss that, so nobody
// may fill that stage again before this warp has copied its tile: it does so itself where the
// ring's length and `under_way` are both even or both odd, and where the length is twice
// `under_way` the other warp waits for that tile in turn.
constexpr int RingLength(int most, int under_way) {
  return (most - under_way) % 2 == 0 || most == 2 * under_way ? most : most - 1;
}

// What of an item its tiles need, kept in registers.
struct TileRanges {
  int key_begin, key_end;
  int dense_begin, dense_end;
  int group_end;

  __device__ explicit TileRanges(const WorkItem& item)
      : key_begin(item.key_begin),
        key_end(item.key_end),
        dense_begin(item.dense_begin),
        dense_end(item.dense_end),
        group_end(item.group_end) {}

  // Whether every row of the block may see every slot of the tile that begins with this group.
  __device__ __forceinline__ bool Dense(int group) const {
    const int first = group * kGroupTokens;
    return first >= dense_begin && first + kTileGroups * kGroupTokens <= dense_end;
  }
};

// Slots that some row sees. Others may hold anything, NaN included, and 0 * NaN is NaN.
struct SlotRange {
  int key_begin, key_end;
};

// Whether these are all slots of the tile that begins with slot `first`.
template <typename Range>
__device__ __forceinline__ bool SeesTile(const Range& range, int first) {
  return first >= range.key_begin && first + kTileGroups * kGroupTokens <= range.key_end;
}

// The tiles of an item that fall to one warpgroup of a block: the cluster's blocks take tiles in
// turn, and so do a block's warpgroups.
struct TileTurns {
  int first;  // in groups from the item's first
  int apart;  // groups from one tile to the next

  __device__ TileTurns(const ClusterPlace& place, int warpgroup)
      : first((static_cast<int>(place.rank) + warpgroup * static_cast<int>(place.size)) *
              kTileGroups),
        apart(kComputeWarpgroups * static_cast<int>(place.size) * kTileGroups) {}
};

// Whether any tile of an item's groups falls to this block of a cluster.
__device__ __forceinline__ bool HasTiles(int group_begin, int group_end,
                                         const ClusterPlace& place) {
  return group_begin + static_cast<int>(place.rank) * kTileGroups < group_end;
}

// Where the groups of K or of V of items lie. An item is given by its first 16 bytes.
template <int kGroupBytes>
class GroupSource {
 public:
  __device__ GroupSource(const AttentionArgs& args, bool values)
      : args_(args), values_(values), shift_(args.page_shift - 4) {}

  __device__ __forceinline__ int Page(int4 item, int group) const {
    return __ldg(args_.page_tables + item.x + (group >> shift_));
  }
  __device__ __forceinline__ const std::byte* At(int4 item, int group, int page) const {
    const size_t plane = size_t(kGroupBytes) << shift_;
    const size_t head = item.y + (values_ ? args_.kv_heads : 0);
    return args_.cache + (size_t(page) * 2 * args_.kv_heads + head) * plane +
           size_t(group & ((1 << shift_) - 1)) * kGroupBytes;
  }
  // By a warp, a lane to a group: the pages of kTilesOfLanes tiles, from the one that begins with
  // `group` on.
  __device__ __forceinline__ int Pages(int4 item, int group, const TileTurns& turns) const {
    const int of_lane = GroupOfLane(group, turns);
    return of_lane < item.w ? Page(item, of_lane) : 0;
  }
  // By a warp: asks L2 for an item's first `tiles` tiles, of these pages. (Line by line: a warp
  // begins bulk operations one after the other, and copying waits for this.)
  __device__ __forceinline__ void Prefetch(int4 item, const TileTurns& turns, int pages,
                                           int tiles) const {
    constexpr int kLine = 128;
    constexpr int kLines = kGroupBytes / kLine;
    const int lane = threadIdx.x % 32;
    const int group = GroupOfLane(item.z + turns.first, turns);
    const auto of_lane =
        reinterpret_cast<uint64_t>(group < item.w ? At(item, group, pages) : nullptr);
#pragma unroll 4
    for (int i = 0; i < tiles * kTileGroups * kLines / 32; ++i) {
      const int line = i * 32 + lane;
      const uint64_t at = __shfl_sync(0xffffffffu, of_lane, line / kLines);
      if (at != 0) PrefetchToL2(reinterpret_cast<const std::byte*>(at) + line % kLines * kLine);
    }
  }

 private:
  // Of kTilesOfLanes tiles from the one that begins with `group` on.
  static __device__ __forceinline__ int GroupOfLane(int group, const TileTurns& turns) {
    const int lane = threadIdx.x % 32;
    return group + lane / kTileGroups * turns.apart + lane % kTileGroups;
  }

  const AttentionArgs& args_;
  const bool values_;
  const int shift_;
};

// What the warpgroups of a block found in a column.
struct ColumnSum {
  float factors[kComputeWarpgroups];  // by these their outputs enter the normalised sum
  float lse2;                         // in base 2
};
struct PerWarpgroup {
  float of[kComputeWarpgroups];
};
__device__ __forceinline__ ColumnSum SumOfWarpgroups(PerWarpgroup sums, PerWarpgroup references,
                                                     float v_scale, float bias) {
  float reference = kNoReference;
#pragma unroll
  for (const float r : references.of) reference = fmaxf(reference, r);
  ColumnSum result;
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kComputeWarpgroups; ++g) {
    result.factors[g] = Exp2(references.of[g] - reference);
    sum += result.factors[g] * sums.of[g];
  }
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(v_scale, sum);
#pragma unroll
  for (int g = 0; g < kComputeWarpgroups; ++g) result.factors[g] *= inverse;
  result.lse2 = sum == 0.0f ? EmptyLse<float>() : reference + __log2f(sum) - bias;
  return result;
}

// Where a column of a block's output goes: the row of O, or of the workspace when the job was cut;
// -1 for none.
struct OutputRow {
  int index;
  bool whole;
};
template <int kColumns>
__device__ __forceinline__ OutputRow RowOfOutput(const AttentionArgs& args, const WorkItem& item,
                                                 int column) {
  const bool whole = item.partial_count == 1;
  if (column >= item.column_count) return {-1, whole};
  return {whole ? static_cast<int>(OutputIndex(args, item, column))
                : (item.partial_begin + item.partial_index) * kColumns + column,
          whole};
}
__device__ __forceinline__ void StoreLse(const AttentionArgs& args, OutputRow row, float lse2) {
  if (row.index < 0) return;
  StoreRelaxed((row.whole ? args.lse : args.partial_lse) + row.index,
               row.whole ? lse2 * kLn2 : lse2);
}

}  // namespace tributary::cuda
