// The computing warpgroups of wgmma_fp8_attention.cuh.
#pragma once

#include "kernels/cuda/decode/nvfp4_keys.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/named_barriers.cuh"
#include "kernels/cuda/decode/sm90/ring.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/decode/sm90/uniform.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_block.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_merge.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/wgmma_fp8.cuh"
#include "kernels/cuda/ptx/wgmma_tiles.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// Which thread block of a cluster merges a packed row. They go to the thread blocks in turn, eight
// at a time, so that in a cluster of two each warp merges one of a thread's two packed rows and
// gives the other one away.
template <int kSize>
struct OwnedPackedRow {
  static __device__ __forceinline__ uint32_t Owner(int packed_row) {
    return static_cast<uint32_t>(packed_row) / 8 % kSize;
  }
  // Its index among those of its thread block.
  static __device__ __forceinline__ int Index(int packed_row) {
    return packed_row / (8 * kSize) * 8 + packed_row % 8;
  }
};
// The index-th packed row that this thread block of the cluster merges.
__device__ __forceinline__ int PackedRowOfOwner(int index, const ClusterPlace& place) {
  return (index / 8 * static_cast<int>(place.size) + static_cast<int>(place.rank)) * 8 + index % 8;
}

// One computing warpgroup's part of an item.
// (Weights are found in wgmma_fp8_softmax.cuh, the output in wgmma_fp8_output.cuh; values that are
// not finite are seen to in wgmma_fp8_hidden.cuh.)
template <typename Traits>
class Fp8Warpgroup {
 public:
  using Shared = typename Traits::Shared;
  static constexpr int kSteps = Traits::kHeadDim / 32;
  // What a thread has of two packed rows: of its warpgroup's output, and of what it is left with
  // when the warpgroups have shared the dimensions out.
  static constexpr int kOutputs = Traits::kHeadDim / 2;
  static constexpr int kOwn = kOutputs / 2;
  static constexpr int kVectors = LaneVectors(Traits::kHeadDim);  // of one row's of kOwn
  static constexpr int kAtOnce = Traits::kTilesAtOnce;

  __device__ Fp8Warpgroup(const AttentionArgs& args, Shared& shared, int warpgroup)
      : args_(args),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % 4),
        warpgroup_(warpgroup),
        packed_row_(warp_ * 16 + lane_ / 4) {}

  // Begins an item, as far as that needs no queries.
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_[i] = 0.0f;
    FenceRegisters(o_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] = 0.0f;
      reference_[r] = kNoReference;
    }
  }

  // Adds this warpgroup's KV tiles of an item: the one that begins with strip `strip` and those
  // that follow `apart` strips apart. `draft`: adds the item's draft block as well.
  __device__ __forceinline__ void AddTiles(const WorkItem& item, int strip, int apart, bool draft) {
    LoadQueries();
#pragma unroll
    for (int r = 0; r < 2; ++r) scale_[r] = shared_.packed_rows.scale[packed_row_ + 8 * r];
    const TileRanges ranges(item);
    if (strip >= ranges.strip_end) return;
    const bool hidden = AddSomeTiles(item, ranges, strip, apart, draft);
    if (__builtin_expect(hidden, 0)) AddHiddenValues(item, strip, apart);
  }

  // Adds an item's draft block, step by step as the widening warps hand it over.
  __device__ __forceinline__ void AddDraftBlock(const WorkItem& item) {
    // The values of a draft block do not have the cache's scale.
    const float weight = __fdividef(1.0f, shared_.v_scale);
    bool hidden = false;
    bool differ = false;  // the block's rows do not all see the same tokens
    int steps;
    int step = 0;
#pragma unroll 1
    do {
      const int of_tile = step % DraftTileFor<Traits>::kSteps;
      if (of_tile == 0) {
        shared_.draft_found.Wait(draft_parity_);
        draft_parity_ ^= 1;
        steps = shared_.draft_steps & ~kDraftRowsDiffer;
        differ = (shared_.draft_steps & kDraftRowsDiffer) != 0;
      }
      if (step < steps) {
        if (differ) hidden |= ConfineDraftStep(of_tile);
        AddDraftStep(of_tile, step == 0, weight);
      }
      ++step;
      if (step >= steps || step % DraftTileFor<Traits>::kSteps == 0) shared_.draft_taken.Arrive();
    } while (step < steps);
    if (__builtin_expect(hidden, 0)) AddHiddenDraftValues(item);
  }

  __device__ __forceinline__ void Combine();

  static __device__ __forceinline__ void ExpectOfCluster(Shared& shared, const ClusterPlace& place);

  __device__ __forceinline__ void Store(const WorkItem& item) const;

  template <int kSize>
  __device__ __forceinline__ void MergeAndStore(const WorkItem& item, const ClusterPlace& place,
                                                uint32_t parity) const;

 private:
  __device__ __forceinline__ OutputRow RowOf(const WorkItem& item, int r) const;
  __device__ __forceinline__ void StoreRow(OutputRow row, int r, const float (&x)[kOwn / 2],
                                           float lse2) const;

  // Loads the queries' pieces to registers. Their place is free for V afterwards.
  __device__ __forceinline__ void LoadQueries() {
    // Lane l gives the address for ldmatrix of row l % 16 and chunk l / 16 of what the warp reads.
    const int first = SwizzledChunk(warp_ * 16 + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int piece = 0; piece < Traits::kPieces; ++piece) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        LoadMatrices(SharedAddress(shared_.q[0] + PairsFurther(first, piece * kSteps + step)),
                     q_[piece][step]);
      }
    }
    shared_.queries_loaded.Arrive();
  }

  __device__ __forceinline__ float4 (*Given(int warpgroup) const)[128];

  template <int kGiven>
  __device__ __forceinline__ void Give() const;
  template <int kGiven>
  __device__ __forceinline__ void Take();

  // Values that are not finite (wgmma_fp8_hidden.cuh).
  __device__ __forceinline__ void AddHiddenValues(const WorkItem& item, int strip, int apart);
  __device__ __forceinline__ bool ConfineDraftStep(int step) const;
  __device__ __forceinline__ void AddHiddenDraftValues(const WorkItem& item);

  // Tiles are taken in groups of kAtOnce; the last group may be smaller. Returns whether values
  // have been taken out of the tiles.
  __device__ __forceinline__ bool AddSomeTiles(const WorkItem& item, const TileRanges& ranges,
                                               int strip, int apart, bool draft) {
    static_assert(kAtOnce <= 2);
    if constexpr (kAtOnce == 2) {
      if (strip + apart >= ranges.strip_end) {
        AddFirstTiles<1>(item, ranges, strip, apart, draft);
        return AddLastValues<1>();
      }
    }
    AddFirstTiles<kAtOnce>(item, ranges, strip, apart, draft);
    for (strip += kAtOnce * apart; strip + (kAtOnce - 1) * apart < ranges.strip_end;
         strip += kAtOnce * apart) {
      AddMoreTiles<kAtOnce>(ranges, strip, apart);
    }
    if constexpr (kAtOnce == 2) {
      if (strip < ranges.strip_end) {
        AddMoreTiles<1>(ranges, strip, apart);
        return AddLastValues<1>();
      }
    }
    return AddLastValues<kAtOnce>();
  }

  // The first group of an item's tiles, whose weights are found. Their values are multiplied later.
  template <int kTiles>
  __device__ __forceinline__ void AddFirstTiles(const WorkItem& item, const TileRanges& ranges,
                                                int strip, int apart, bool draft) {
    StartKeys<kTiles>();
    if constexpr (Traits::kDraftBlock) {
      if (draft) AddDraftBlock(item);
    }
    WgmmaWait();
    FenceRegisters(s_);
    float factors[2];
    const bool raised = Weigh</*kFirst=*/true, kTiles>(ranges, strip, apart, factors);
    if constexpr (!OfNvfp4<Traits>) FindUnits();
    if constexpr (Traits::kDraftBlock) {  // otherwise there is no output yet
      if (raised) ScaleOutput(factors);
    }
    PackWeights<kTiles>();
  }

  // A later group. While it is weighed, the tensor cores multiply the values of the group before.
  template <int kTiles>
  __device__ __forceinline__ void AddMoreTiles(const TileRanges& ranges, int strip, int apart) {
    StartKeys<kTiles>();
    MultiplyValues<kAtOnce>();
    WgmmaWaitFor<1>();
    FenceRegisters(s_);
    float factors[2];
    const bool raised = Weigh</*kFirst=*/false, kTiles>(ranges, strip, apart, factors);
    WgmmaWait();
    FenceRegisters(o_);
    FenceWeights();
    LeaveValues<kAtOnce>();
    if (__builtin_expect(raised, 0)) ScaleOutput(factors);
    PackWeights<kTiles>();
  }

  // The values of the last group.
  template <int kTiles>
  __device__ __forceinline__ bool AddLastValues() {
    MultiplyValues<kTiles>();
    const bool hidden = __any_sync(0xffffffffu, shared_.values_hidden[warpgroup_] != 0);
    WgmmaWait();
    FenceRegisters(o_);
    LeaveValues<kTiles>();
    return hidden;
  }

  // Adds sixteen tokens of a draft block. `first`: there is no output yet.
  __device__ __forceinline__ void AddDraftStep(int step, bool first, float weight) {
    const DraftTileFor<Traits>& tile = DraftTileOf<Traits>(shared_);
    float s[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 x = tile.logits[2 * step + i][threadIdx.x % 128];
      s[i][0] = x.x, s[i][1] = x.y, s[i][2] = x.z, s[i][3] = x.w;
    }
    const float peaks[2] = {fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1])),
                            fmaxf(fmaxf(s[0][2], s[0][3]), fmaxf(s[1][2], s[1][3]))};
    float factors[2];
    RaiseReferences(peaks, factors);
    if (!first) ScaleOutput(factors);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 2 % 2;
      float& x = s[i / 4][i % 4];
      x = Exp2(x + (Traits::kBias - reference_[r]));
      sum_[r] += x;
      x *= weight;
    }
    PackDraftWeights<DType::kBf16>(s, p_[0]);
    FenceRegisters(p_[0]);
    FenceRegisters(o_);
    WgmmaFence();
    WgmmaRegisters<DType::kBf16>(
        o_, p_[0][0], p_[0][1], p_[0][2], p_[0][3],
        ColumnMajorDescriptor(SharedAddress(tile.values), step, tile.kPanelBytes));
    WgmmaCommit();
    WgmmaWait();
    FenceRegisters(o_);
  }

  // Gives the stages of a group's keys back. `read`: this warp's lanes have read them too, for a
  // second product.
  template <int kTiles>
  __device__ __forceinline__ void LeaveKeys(bool read) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      CopyBarrier& empty = shared_.keys_empty[warpgroup_][keys_.stage];
      if (read) {
        empty.Arrive();
      } else if (lane_ == 0) {
        empty.ArriveFor(32);
      }
      keys_.Advance();
    }
  }
  template <int kTiles>
  __device__ __forceinline__ void LeaveValues() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (lane_ == 0) shared_.wide_empty[warpgroup_][values_.stage].Arrive();
      values_.Advance();
    }
  }
  __device__ __forceinline__ void FenceWeights() { FenceRegisters(p_); }

  // All at once: the compiler runs products one by one between which somebody may wait.
  template <int kTiles, int kStages>
  static __device__ __forceinline__ void WaitForTiles(CopyBarrier (&full)[kStages],
                                                      RingPlace<kStages> at) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile, at.Advance()) full[at.stage].Wait(at.parity);
  }

  // Starts S of a group's tiles as soon as their keys have come.
  template <int kTiles>
  __device__ __forceinline__ void StartKeys() {
    WaitForTiles<kTiles>(shared_.keys_full[warpgroup_], keys_);
    FenceWeights();
    WgmmaFence();
    RingPlace<Traits::kKeyStages> at = keys_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile, at.Advance()) {
      const uint32_t keys = SharedAddress(shared_.keys[warpgroup_][at.stage]);
      if constexpr (OfNvfp4<Traits>) {
        MultiplyWideKeys(keys, s_[tile]);
      } else {
        MultiplyPieces(keys, s_[tile]);
      }
    }
    WgmmaCommit();
  }
  // The smaller pieces come first: what is added to a large sum loses what is below the sum's last
  // place.
  __device__ __forceinline__ void MultiplyPieces(uint32_t from, float (&s)[32]) {
    const uint64_t keys = KeyDescriptor(from);
#pragma unroll
    for (int piece = Traits::kPieces - 1; piece >= 0; --piece) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        WgmmaFp8<Traits::kKv>(s, q_[piece][step], KeyDescriptorOfStep(keys, step),
                              piece != Traits::kPieces - 1 || step > 0);
      }
    }
  }
  __device__ __forceinline__ void MultiplyWideKeys(uint32_t from, float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < Traits::kPieces; ++half) {
      const uint64_t keys = TileDescriptor(from + half * (kTileSlots * kTileRowBytes));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Wgmma<DType::kF16, 64>(s, q_[half][step], DescriptorOfStep(keys, step),
                               half > 0 || step > 0);
      }
    }
  }
  // Starts O of a group's tiles as soon as their values have been widened.
  template <int kTiles>
  __device__ __forceinline__ void MultiplyValues() {
    WaitForTiles<kTiles>(shared_.wide_full[warpgroup_], values_);
    FenceWeights();
    WgmmaFence();
    RingPlace<Traits::kWideStages> at = values_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile, at.Advance()) {
      const uint64_t values = TileDescriptor(SharedAddress(shared_.wide[warpgroup_][at.stage]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t(&p)[4] = p_[tile * 4 + step];
        WgmmaRegisters<DType::kF16, /*kRowsSummed=*/false>(o_, p[0], p[1], p[2], p[3],
                                                           DescriptorOfStep(values, step));
      }
    }
    WgmmaCommit();
  }

  template <bool kFirst, int kTiles>
  __device__ __forceinline__ bool Weigh(const TileRanges& ranges, int strip, int apart,
                                        float (&factors)[2]);
  template <bool kFirst, int kTiles>
  __device__ __forceinline__ bool WeighAsTold(int strip, int apart, bool dense,
                                              float (&factors)[2]);
  template <int kTiles>
  __device__ __forceinline__ void TakeWeights(float (&sums)[2]);
  __device__ __forceinline__ void AddSums(const float (&sums)[2]);

  __device__ __forceinline__ void FindUnits();
  template <int kTiles>
  __device__ __forceinline__ bool IsUnusual(float sum, int r) const;
  __device__ __forceinline__ void RaiseReferences(const float (&peaks)[2], float (&factors)[2]);
  __device__ __forceinline__ void ScaleOutput(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o_[i] *= factors[i / 2 % 2];
  }
  template <int kTiles>
  __device__ __forceinline__ void FindPeaks(float (&peaks)[2]) const;
  static __device__ __forceinline__ bool IsLarge(float logit);
  __device__ __forceinline__ bool Exceeds(float logit, int r) const;
  template <bool kHigh>
  __device__ __forceinline__ uint32_t WholeQuery(int step, int i) const;
  template <int kTiles>
  __device__ __forceinline__ void MultiplyKeysExactly();
  __device__ __forceinline__ void MultiplyExactly(const std::byte* keys, float (&s)[32]) const;
  template <int kTiles>
  __device__ __forceinline__ void MaskScores(int strip, int apart);
  template <int kTiles>
  __device__ __forceinline__ void PackWeights();

  const AttentionArgs& args_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const int warpgroup_;
  const int packed_row_;  // the first of this thread's two packed rows; the other is eight further
  RingPlace<Traits::kKeyStages> keys_;
  RingPlace<Traits::kWideStages> values_;
  uint32_t q_[Traits::kPieces][kSteps][4];
  float s_[kAtOnce][32];
  uint32_t p_[kAtOnce * 4][4];
  float o_[kOutputs];
  float own_[kOwn];
  float lse2_[2];
  float scale_[2];
  float reference_[2];
  float sum_[2];
  float unit_[2];  // the weight of a logit of 0
  bool sums_tell_;
  uint32_t draft_parity_ = 0;
};

}  // namespace tributary::cuda
