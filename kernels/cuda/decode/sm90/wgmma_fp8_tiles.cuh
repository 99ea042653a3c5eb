// The warps of wgmma_fp8_attention.cuh that do not multiply: they copy tiles of K and V from the
// cache to shared memory, and widen V there.
#pragma once

#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// Stages of keys that are to be widened.
template <typename Traits>
constexpr int RawKeyStages() {
  if constexpr (OfNvfp4<Traits>) return Traits::kRawKeyStages;
  return 1;
}

// One of four copying warps. It copies K or V of one warpgroup's tiles, one strip per lane.
template <typename Traits>
class Fp8Copier {
 public:
  using Shared = typename Traits::Shared;

  __device__ Fp8Copier(const AttentionArgs& args, const ClusterPlace& place, Shared& shared,
                       int warp)
      : shared_(shared),
        half_(warp / 2),
        values_(warp % 2 != 0),
        turns_(place, half_),
        source_(args, values_) {}

  // Initialises the barriers of the ring that this warp fills, of the ring of widened values, and
  // whatever else the thread block waits for. Called by all lanes.
  __device__ __forceinline__ void InitBarriers(const ClusterPlace& place) const {
    if (threadIdx.x % 32 == 0) {
      if (values_) {
        InitRing(shared_.values_full[half_], 1, shared_.values_empty[half_], 64);
        InitRing(shared_.wide_full[half_], 64, shared_.wide_empty[half_], 4);
      } else if constexpr (OfNvfp4<Traits>) {
        InitRing(shared_.raw_keys_full[half_], 1, shared_.raw_keys_empty[half_], 64);
        InitRing(shared_.keys_full[half_], 64, shared_.keys_empty[half_], 128);
      } else {
        InitRing(shared_.keys_full[half_], 1, shared_.keys_empty[half_], 128);
      }
      if (values_ && half_ == 0) {
        shared_.queries_loaded.Init(Traits::kThreads);
        shared_.queries_here.Init(Traits::kThreads);
        shared_.draft_found.Init(128);
        shared_.draft_taken.Init(128);
        shared_.published.Init();
        shared_.read.Init(place.size, Traits::kThreads);
      }
    }
    __syncwarp();
    FenceBarrierInit();
  }

  // The first pages of an item, which is given by its first 16 bytes. CopyItem takes them.
  __device__ __forceinline__ int FirstPages(int4 item) const {
    return source_.Pages(item, item.z + turns_.first, turns_);
  }
  // Asks L2 for the first tiles. They are few: all thread blocks begin at once, and what the others
  // ask for comes before this one's first keys.
  __device__ __forceinline__ void Prefetch(int4 item, int pages) const {
    source_.Prefetch(item, turns_, pages, values_ ? 2 : 1);
  }

  // then(copied) is called when a tile has been asked for, with the number of tiles so far.
  template <typename Then>
  __device__ __forceinline__ void CopyItem(int4 item, int pages, Then then) {
    if (values_) {
      Copy<Traits::kValueStages, Traits::kValueStripStride, 1>(
          item, pages, shared_.values_full[half_], shared_.values_empty[half_],
          shared_.values[half_], value_place_, then);
    } else if constexpr (OfNvfp4<Traits>) {
      Copy<Traits::kRawKeyStages, Traits::kStripStride, 1>(
          item, pages, shared_.raw_keys_full[half_], shared_.raw_keys_empty[half_],
          shared_.raw_keys[half_], raw_key_place_, then);
    } else {
      Copy<Traits::kKeyStages, Traits::kPanelBytes, Traits::kPanels>(
          item, pages, shared_.keys_full[half_], shared_.keys_empty[half_], shared_.keys[half_],
          key_place_, then);
    }
  }

 private:
  // The addresses are the same for all lanes of the warp. Addresses that depend on the lane would
  // be worked off lane by lane.
  template <int kStages>
  static __device__ __forceinline__ void InitRing(CopyBarrier (&full)[kStages],
                                                  uint32_t arrivals_at_full,
                                                  CopyBarrier (&empty)[kStages],
                                                  uint32_t arrivals_at_empty) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].Init(arrivals_at_full);
      empty[stage].Init(arrivals_at_empty);
    }
  }

  // Copies every strip in kPieces pieces: first the first pieces of all strips of a tile, kStride
  // bytes apart, then the second ones.
  template <int kStages, int kStride, int kPieces, typename Stage, typename Then>
  __device__ __forceinline__ void Copy(int4 item, int pages, CopyBarrier* full, CopyBarrier* empty,
                                       Stage* stages, RingPlace<kStages>& place, Then then) {
    constexpr uint32_t kBytes = Traits::kStripBytes / kPieces;
    const int lane = threadIdx.x % kTileStrips;
    const int piece = threadIdx.x % 32 / kTileStrips;
    int next_pages = 0;
    int tile = 0;
    for (int strip = item.z + turns_.first; strip < item.w; strip += turns_.apart) {
      if (tile == 0) {
        next_pages = source_.Pages(item, strip + kTilesOfLanes * turns_.apart, turns_);
      }
      const int page = __shfl_sync(0xffffffffu, pages, tile * kTileStrips + lane);
      // The stage's previous use ended with the phase before this one.
      if (copied_ == kStages) WaitForCluster(ThisCluster());
      if (copied_ >= kStages) empty[place.stage].Wait(place.parity ^ 1);
      CopyBarrier& barrier = full[place.stage];
      if (threadIdx.x % 32 == 0) {
        barrier.ArriveAndExpect(min(kTileStrips, item.w - strip) * uint32_t(Traits::kStripBytes));
      }
      __syncwarp();
      if (piece < kPieces && strip + lane < item.w) {
        BulkCopy(stages[place.stage] + (piece * kTileStrips + lane) * kStride,
                 source_.At(item, strip + lane, page) + piece * kBytes, kBytes, barrier,
                 ReadOnce());
      }
      place.Advance();
      ++copied_;
      then(copied_);
      if (++tile == kTilesOfLanes) {
        tile = 0;
        pages = next_pages;
      }
    }
  }

  Shared& shared_;
  const int half_;  // of the tiles
  const bool values_;
  const TileTurns turns_;
  const StripSource<Traits::kStripBytes, Traits::kStripBytes> source_;
  RingPlace<Traits::kKeyStages> key_place_;
  RingPlace<RawKeyStages<Traits>()> raw_key_place_;
  RingPlace<Traits::kValueStages> value_place_;
  int copied_ = 0;  // tiles
};

// One of four widening warps. Two of them widen the tiles of V of one computing warpgroup.
template <typename Traits>
class ValueWidener {
 public:
  using Shared = typename Traits::Shared;

  __device__ ValueWidener(const ClusterPlace& place, Shared& shared, int warp)
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
      shared_.values_full[half_][from_.stage].Wait(from_.parity);
      if (widened_ >= Traits::kWideStages) {
        shared_.wide_empty[half_][to_.stage].Wait(to_.parity ^ 1);
      }
      if constexpr (Traits::kDraftBlock) {
        if (half_ == 0 && to_.stage == kDraftStage) draft.WaitUntilTaken(shared_);
      }
      if (!ranges.Dense(strip) && RowsDiffer(ranges)) {
        KeepFinite(shared_.values[half_][from_.stage], strip * kStripSlots, ranges, lane);
      }
      WidenTile(shared_.values[half_][from_.stage], shared_.wide[half_][to_.stage],
                strip * kStripSlots, ranges, lane);
      FenceSharedForWgmma();
      shared_.wide_full[half_][to_.stage].Arrive();
      shared_.values_empty[half_][from_.stage].Arrive();
      from_.Advance();
      to_.Advance();
      ++widened_;
    }
  }

 private:
  // A lane takes four dimensions of a strip. Neighbouring lanes take different strips, so that any
  // eight of them read, and write, different banks.
  static constexpr int kFours = Traits::kHeadDim / 64;  // that a lane takes
  __device__ __forceinline__ int FourOf(int i, int lane) const {
    return (kFours * part_ + i) * 8 + lane / 4;
  }
  __device__ __forceinline__ int PlaceOf(int i, int lane) const {
    return lane % 4 * Traits::kValueStripStride + FourOf(i, lane) * 4 * kVectorBytes;
  }

  __device__ __forceinline__ void WidenTile(const std::byte* values, std::byte* wide, int first,
                                            const SlotRanges& ranges, int lane) const {
    const int strip = lane % 4;
    const bool whole = SeesTile(ranges, first);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int four = FourOf(i, lane);
      const auto* from = reinterpret_cast<const uint4*>(values + PlaceOf(i, lane));
      uint32_t words[4][4];  // quads of tokens of a dimension
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        uint4 x = from[quad];
        if (!whole) {
          KeepTokens<Traits::kKv>(
              x, AliveTokens(ranges, first + strip * kStripSlots + quad * kQuadTokens));
        }
        words[quad][0] = x.x, words[quad][1] = x.y, words[quad][2] = x.z, words[quad][3] = x.w;
      }
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const uint4 vector = make_uint4(words[0][d], words[1][d], words[2][d], words[3][d]);
        uint32_t low[4], high[4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
          WidenQuad<Traits::kKv>(vector, quad, low[quad], high[quad]);
        }
        const int row = four * 4 + d;
        *reinterpret_cast<uint4*>(wide + SwizzledChunk(row, strip)) =
            make_uint4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<uint4*>(wide + SwizzledChunk(row, 4 + strip)) =
            make_uint4(high[0], high[1], high[2], high[3]);
      }
    }
  }

  // Takes what is not finite out of this lane's values of a tile. Says so to the warpgroup that
  // computes, if some row sees it.
  __device__ __forceinline__ void KeepFinite(std::byte* values, int first, const SlotRanges& ranges,
                                             int lane) const {
    NonFiniteSearch<Traits::kKv> search;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const auto* at = reinterpret_cast<const uint4*>(values + PlaceOf(i, lane));
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) search.Look(at[quad]);
    }
    if (__builtin_expect(!__any_sync(0xffffffffu, search.Found()), 1)) return;
    NonFiniteSearch<Traits::kKv> seen;
#pragma unroll 1
    for (int i = 0; i < kFours; ++i) {
      auto* at = reinterpret_cast<uint4*>(values + PlaceOf(i, lane));
#pragma unroll 1
      for (int quad = 0; quad < 4; ++quad) {
        uint4 x = at[quad];
        at[quad] = FiniteOnly<Traits::kKv>(x);
        KeepTokens<Traits::kKv>(
            x, AliveTokens(ranges, first + lane % 4 * kStripSlots + quad * kQuadTokens));
        seen.Look(x);
      }
    }
    if (seen.Found()) shared_.values_hidden[half_] = 1;
  }

  Shared& shared_;
  const int half_;  // of the tiles
  const int part_;  // of the dimensions
  const TileTurns turns_;
  RingPlace<Traits::kValueStages> from_;
  RingPlace<Traits::kWideStages> to_;
  int widened_ = 0;  // tiles
};

}  // namespace tributary::cuda
