// The warps of wgmma_attention.cuh that bring tiles of K and V from the cache to shared memory.
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/ptx/bulk_copy.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"

namespace tributary::cuda {

// A copying warp: brings K or V of one half of the tiles of every item, in order, a lane to a strip
// of 16 tokens. Each such ring and half has a warp of its own: the hardware takes the copies of a
// warp's lanes one by one, and a single warp is too slow for all.
template <typename Traits>
class TileCopier {
 public:
  using Shared = typename Traits::Shared;

  __device__ TileCopier(const AttentionArgs& args, const ClusterPlace& place, Shared& shared,
                        int warp)
      : shared_(shared),
        half_(warp / 2),
        values_(warp % 2 != 0),
        turns_(place, half_),
        source_(args, values_) {
    if (values_) place_.Advance();
  }

  // By all lanes: readies half of the barriers of this warp's ring.
  __device__ void InitBarriers() {
    const int lane = threadIdx.x % 32;
    if (lane >= Traits::kStages) return;
    if (values_) {
      shared_.full[half_][lane].Init(1);
    } else {
      shared_.empty[half_][lane].Init(128);
    }
  }

  // Asks L2 for the first tiles of an item, given by its first 16 bytes.
  __device__ void Prefetch(int4 item) const {
    const int pages = source_.Pages(item, item.z + turns_.first, turns_);
    source_.Prefetch(item, turns_, pages, (Traits::kStages + 1) / 2);
  }

  __device__ void CopyItem(int4 item) {
    const int lane = threadIdx.x % 32;
    int strip = item.z + turns_.first;
    const bool copies = lane < kTileStrips;
    int page = copies && strip + lane < item.w ? source_.Page(item, strip + lane) : 0;
    for (; strip < item.w; strip += turns_.apart) {
      const int next = strip + turns_.apart + lane;
      const int next_page = copies && next < item.w ? source_.Page(item, next) : 0;
      // The stage's previous use ended with the phase before this one.
      const int use = 2 * copied_ + (values_ ? 1 : 0);
      if (use >= Traits::kStages) {
        if (use < Traits::kStages + 2) WaitForCluster(ThisCluster());  // this warp's first
        shared_.empty[half_][place_.stage].Wait(place_.parity ^ 1);
      }
      if (use >= Traits::kUnderWay && Traits::kUnderWay < Traits::kStages) WaitForEarlierTile();
      constexpr bool kAlike = Traits::kKeyStripBytes == Traits::kValueStripBytes;
      const size_t strip_bytes =
          kAlike || !values_ ? Traits::kKeyStripBytes : Traits::kValueStripBytes;
      CopyBarrier& full = shared_.full[half_][place_.stage];
      if (lane == 0) full.ArriveAndExpect(min(kTileStrips, item.w - strip) * uint32_t(strip_bytes));
      __syncwarp();
      if (copies && strip + lane < item.w) {
        BulkCopy(shared_.stages[half_][place_.stage] + lane * strip_bytes,
                 source_.At(item, strip + lane, page), uint32_t(strip_bytes), full, ReadOnce());
      }
      place_.Advance();
      place_.Advance();
      ++copied_;
      page = next_page;
    }
  }

 private:
  // Until the tile has come that is kUnderWay places before this one.
  __device__ __forceinline__ void WaitForEarlierTile() const {
    const auto earlier = place_.Before(Traits::kUnderWay);
    shared_.full[half_][earlier.stage].Wait(earlier.parity);
  }

  Shared& shared_;
  const int half_;
  const bool values_;
  const TileTurns turns_;
  const StripSource<int(Traits::kKeyStripBytes), int(Traits::kValueStripBytes)> source_;
  RingPlace<Traits::kStages> place_;
  int copied_ = 0;  // tiles
};

}  // namespace tributary::cuda
