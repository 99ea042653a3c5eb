// What a computing warpgroup does, for wgmma_fp8_attention.cuh.
#pragma once

#include "kernels/cuda/decode/columns.cuh"
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

// Which block of a cluster merges a column: eights of columns go to the blocks in turn, so that in
// a pair each warp merges one of its two and gives the other away.
template <int kSize>
struct OwnedColumn {
  static __device__ __forceinline__ uint32_t Owner(int column) {
    return static_cast<uint32_t>(column) / 8 % kSize;
  }
  // Among those of its block.
  static __device__ __forceinline__ int Index(int column) {
    return column / (8 * kSize) * 8 + column % 8;
  }
};
// The index-th column that the block of a cluster merges.
__device__ __forceinline__ int ColumnOfOwner(int index, const ClusterPlace& place) {
  return (index / 8 * static_cast<int>(place.size) + static_cast<int>(place.rank)) * 8 + index % 8;
}

// A warpgroup's part of an item.
template <typename Traits>
class Fp8Warpgroup {
 public:
  using Shared = typename Traits::Shared;
  static constexpr int kSteps = Traits::kHeadDim / 32;

  __device__ Fp8Warpgroup(const AttentionArgs& args, Shared& shared, int warpgroup)
      : args_(args),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32 % 4),
        warpgroup_(warpgroup),
        column_(warp_ * 16 + lane_ / 4) {}

  // What needs no queries.
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int i = 0; i < 64; ++i) o_[i] = 0.0f;
    FenceRegisters(o_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] = 0.0f;
      reference_[r] = kNoReference;
    }
  }

  // Adds the tiles of an item of which the block has some: those from `group`, `apart` groups
  // apart. `draft`: the item's draft's block as well.
  __device__ __forceinline__ void AddTiles(const WorkItem& item, int group, int apart, bool draft) {
    LoadQueries();
#pragma unroll
    for (int r = 0; r < 2; ++r) scale_[r] = shared_.columns.scale[column_ + 8 * r];
    const TileRanges ranges(item);
    if (group < ranges.group_end) AddSomeTiles(ranges, group, apart, draft);
  }

  // Adds a draft's block as the warps that widen find it.
  __device__ __forceinline__ void AddDraftBlock() {
    // V there is not in the cache's scale.
    const float weight = __fdividef(1.0f, shared_.v_scale);
    int steps;
    int step = 0;
#pragma unroll 1
    do {
      const int of_tile = step % DraftTile::kSteps;
      if (of_tile == 0) {
        shared_.draft_found.Wait(draft_parity_);
        draft_parity_ ^= 1;
        steps = shared_.draft_steps;
      }
      if (step < steps) AddDraftStep(of_tile, step == 0, weight);
      ++step;
      if (step >= steps || step % DraftTile::kSteps == 0) shared_.draft_taken.Arrive();
    } while (step < steps);
  }

  // Adds up what the block's warpgroups found: each is left with half of the dimensions.
  __device__ __forceinline__ void Combine() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sum_[r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane_ % 4 == 0) {
        shared_.sum[warpgroup_][column_ + 8 * r] = sum;
        shared_.reference[warpgroup_][column_ + 8 * r] = reference_[r];
      }
    }
    SyncWarpgroup(kFp8WarpgroupBarrier +
                  warpgroup_);  // its V gives way to the half of its output that the other takes
    if (warpgroup_ == 0) {
      Give<1>();
    } else {
      Give<0>();
    }
    SyncThreads<Traits::kThreads>();  // (In one place for both, or synccheck takes it for
                                      // divergence.)
    if (warpgroup_ == 0) {
      Take<1>();
    } else {
      Take<0>();
    }
  }

  // Announces what MergeAndStore waits for. By one thread.
  static __device__ __forceinline__ void ExpectOfCluster(Shared& shared,
                                                         const ClusterPlace& place) {
    constexpr uint32_t kColumnBytes = (Traits::kHeadDim + 1) * sizeof(float);
    const uint32_t own = Traits::kColumns / place.size;
    if (place.size > 1) shared.published.Expect((Traits::kColumns - own) * kColumnBytes);
  }

  // Writes the block's output, or its piece's partial.
  __device__ __forceinline__ void Store(const WorkItem& item) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = own_[i / 2 * 4 + r * 2 + i % 2];
      StoreRow(RowOf(item, r), r, x, lse2_[r]);
    }
  }

  // The same of the cluster: its blocks share the columns out, and each is given what the others
  // found of its own. The caller has waited for these to have read what they were given before.
  template <int kSize>
  __device__ __forceinline__ void MergeAndStore(const WorkItem& item, const ClusterPlace& place,
                                                uint32_t parity) const {
    constexpr int kOwnRows = Traits::kColumns / kSize;
    constexpr int kRowVectors = 4 * kOwnRows;  // of a source, each quarter
    const auto entry_of = [&](int r) {
      return OwnedColumn<kSize>::Index(column_ + 8 * r) * 4 + lane_ % 4;
    };
    const auto owner_of = [&](int r) { return OwnedColumn<kSize>::Owner(column_ + 8 * r); };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t owner = owner_of(r);
      if (warpgroup_ == 0 && lane_ % 4 == 0) {
        float* const lse2 = &shared_.block_lse2[place.rank][column_ + 8 * r];
        if (owner == place.rank) {
          *lse2 = lse2_[r];
        } else {
          StoreAsyncIn(SharedAddressIn(lse2, owner), lse2_[r], shared_.published.AddressIn(owner));
        }
      }
      if (owner == place.rank) continue;
      const uint32_t source = place.rank - (place.rank > owner ? 1 : 0);
      const uint32_t to = SharedAddressIn(
          &shared_.inbox[warpgroup_][source * 4 * kRowVectors + entry_of(r)], owner);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float* x = own_ + v * 8 + r * 2;
        StoreAsyncIn(to + v * kRowVectors * sizeof(float4), make_float4(x[0], x[1], x[4], x[5]),
                     shared_.published.AddressIn(owner));
      }
    }
    const OutputRow rows[2] = {RowOf(item, 0), RowOf(item, 1)};
    SyncThreads<Traits::kThreads>();
    shared_.published.Wait(parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (owner_of(r) != place.rank) continue;
      const int column = column_ + 8 * r;
      float max = kNoReference;
#pragma unroll
      for (int s = 0; s < kSize; ++s) max = fmaxf(max, shared_.block_lse2[s][column]);
      float weights[kSize];
      float sum = 0.0f;
#pragma unroll
      for (int s = 0; s < kSize; ++s) {
        weights[s] = Exp2(shared_.block_lse2[s][column] - max);
        sum += weights[s];
      }
      const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
      const float4* from = &shared_.inbox[warpgroup_][entry_of(r)];
      float x[16] = {};
#pragma unroll
      for (int s = 0; s < kSize; ++s) {
        const float weight = weights[s] * inverse;
        const bool own = s == static_cast<int>(place.rank);
        const int source = s - (s > static_cast<int>(place.rank) ? 1 : 0);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float* mine = own_ + v * 8 + r * 2;
          float4 part = make_float4(mine[0], mine[1], mine[4], mine[5]);
          if (!own) part = from[(source * 4 + v) * kRowVectors];
          x[v * 4] += weight * part.x;
          x[v * 4 + 1] += weight * part.y;
          x[v * 4 + 2] += weight * part.z;
          x[v * 4 + 3] += weight * part.w;
        }
      }
      StoreRow(rows[r], r, x, sum == 0.0f ? EmptyLse<float>() : max + __log2f(sum));
    }
  }

 private:
  // Of this thread's column r.
  __device__ __forceinline__ OutputRow RowOf(const WorkItem& item, int r) const {
    return RowOfOutput<Traits::kColumns>(args_, item, column_ + 8 * r);
  }
  // A column's half of the dimensions, two of every eight in a lane; of column r of this thread.
  __device__ __forceinline__ void StoreRow(OutputRow row, int r, const float (&x)[16],
                                           float lse2) const {
    static_assert(Traits::kColumns * Traits::kHeadDim == PartialFragments::kFloats);
    if (row.index < 0) return;
    if (row.whole) {
      float* const to =
          args_.o + size_t(row.index) * Traits::kHeadDim + warpgroup_ * 64 + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        StoreRelaxed(to + i * 8, make_float2(x[2 * i], x[2 * i + 1]));
      }
    } else {
      float* const to = args_.partial_o +
                        size_t(row.index / Traits::kColumns) * PartialFragments::kFloats +
                        PartialFragments::Of(threadIdx.x, r, 0);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        __stcg(reinterpret_cast<float4*>(to + PartialFragments::Of(0, 0, v)),
               make_float4(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]));
      }
    }
    if (warpgroup_ == 0 && lane_ % 4 == 0) StoreLse(args_, row, lse2);
  }

  // The place of queries is then free for V.
  __device__ __forceinline__ void LoadQueries() {
    // Lane l gives the address of row l % 16 and chunk l / 16 of what the warp reads.
    const int first = SwizzledChunk(warp_ * 16 + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int piece = 0; piece < Traits::kPieces; ++piece) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int at = first ^ step * 32;  // (two chunks further)
        LoadMatrices(SharedAddress(shared_.q[piece] + at), q_[piece][step]);
      }
    }
    shared_.queries_loaded.Arrive();
  }

  // Where a warpgroup leaves the half of its output that the other takes.
  __device__ __forceinline__ float4 (*Given(int warpgroup) const)[128] {
    return reinterpret_cast<float4(*)[128]>(shared_.wide[warpgroup][0]);
  }

  template <int kGiven>
  __device__ __forceinline__ void Give() const {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float* x = o_ + kGiven * 32 + i;
      Given(warpgroup_)[i / 4][thread] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  template <int kGiven>
  __device__ __forceinline__ void Take() {
    constexpr int kKept = 1 - kGiven;
    const int thread = threadIdx.x % 128;
    float kept[2], added[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int c = column_ + 8 * r;
      const ColumnSum sum = SumOfWarpgroups({shared_.sum[0][c], shared_.sum[1][c]},
                                            {shared_.reference[0][c], shared_.reference[1][c]},
                                            shared_.v_scale, Traits::kBias);
      kept[r] = sum.factors[1 - kGiven];
      added[r] = sum.factors[kGiven];
      lse2_[r] = sum.lse2;
    }
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float4 given = Given(kGiven)[i / 4][thread];
      const float x[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        own_[i + e] = o_[kKept * 32 + i + e] * kept[e / 2] + x[e] * added[e / 2];
      }
    }
  }

  // While a tile is weighed, the tensor cores multiply the values of the tile before it.
  __device__ __forceinline__ void AddSomeTiles(const TileRanges& ranges, int group, int apart,
                                               bool draft) {
    WaitForKeys();
    WgmmaFence();
    MultiplyKeys();
    WgmmaCommit();
    if constexpr (Traits::kDraftBlock) {
      if (draft) AddDraftBlock();
    }
    WgmmaWait();
    FenceRegisters(s_);
    float factors[2];
    const bool raised_first = Weigh</*kFirst=*/true>(ranges, group, factors);
    FindUnits();
    if constexpr (Traits::kDraftBlock) {  // otherwise there is no output yet
      if (raised_first) ScaleOutput(factors);
    }
    PackWeights();
    for (group += apart; group < ranges.group_end; group += apart) {
      WaitForKeys();
      FenceWeights();
      WgmmaFence();
      MultiplyKeys();
      WgmmaCommit();
      WaitForValues();
      WgmmaFence();
      MultiplyValues();
      WgmmaCommit();
      WgmmaWaitFor<1>();
      FenceRegisters(s_);
      const bool raised = Weigh</*kFirst=*/false>(ranges, group, factors);
      WgmmaWait();
      FenceRegisters(o_);
      FenceWeights();
      LeaveValues();
      if (__builtin_expect(raised, 0)) ScaleOutput(factors);
      PackWeights();
    }
    WaitForValues();
    FenceWeights();
    WgmmaFence();
    MultiplyValues();
    WgmmaCommit();
    WgmmaWait();
    FenceRegisters(o_);
    LeaveValues();
  }

  // Sixteen tokens of a draft's block. `first`: there is no output yet.
  __device__ __forceinline__ void AddDraftStep(int step, bool first, float weight) {
    const DraftTile& tile = DraftTileOf<Traits>(shared_);
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
        ColumnMajorDescriptor(SharedAddress(tile.values), step, DraftTile::kPanelBytes));
    WgmmaCommit();
    WgmmaWait();
    FenceRegisters(o_);
  }

  __device__ __forceinline__ void WaitForKeys() {
    shared_.keys_full[warpgroup_][keys_.stage].Wait(keys_.parity);
  }
  // `read`: they have been, by this warp's lanes, and not only multiplied.
  __device__ __forceinline__ void LeaveKeys(bool read) {
    CopyBarrier& empty = shared_.keys_empty[warpgroup_][keys_.stage];
    if (read) {
      empty.Arrive();
    } else if (lane_ == 0) {
      empty.ArriveFor(32);
    }
    keys_.Advance();
  }
  __device__ __forceinline__ void WaitForValues() {
    shared_.wide_full[warpgroup_][values_.stage].Wait(values_.parity);
  }
  __device__ __forceinline__ void LeaveValues() {
    if (lane_ == 0) shared_.wide_empty[warpgroup_][values_.stage].Arrive();
    values_.Advance();
  }
  __device__ __forceinline__ void FenceWeights() {
#pragma unroll
    for (int i = 0; i < 4; ++i) FenceRegisters(p_[i]);
  }

  // Starts S of a tile. The smaller pieces first: what is added to a sum loses what is below its
  // last place.
  __device__ __forceinline__ void MultiplyKeys() {
    const uint64_t keys = KeyDescriptor(SharedAddress(shared_.keys[warpgroup_][keys_.stage]));
#pragma unroll
    for (int piece = Traits::kPieces - 1; piece >= 0; --piece) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        WgmmaFp8<Traits::kKv>(s_, q_[piece][step], KeyDescriptorOfStep(keys, step),
                              piece != Traits::kPieces - 1 || step > 0);
      }
    }
  }
  __device__ __forceinline__ void MultiplyValues() {
    const uint64_t values = TileDescriptor(SharedAddress(shared_.wide[warpgroup_][values_.stage]));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      WgmmaRegisters<DType::kF16, /*kRowsSummed=*/false>(
          o_, p_[step][0], p_[step][1], p_[step][2], p_[step][3], DescriptorOfStep(values, step));
    }
  }

  // Turns raw products into weights, in place, and leaves the keys. Returns whether references were
  // raised, and by which factors O is to be multiplied then.
  //
  // Most tiles are weighed without a look at their logits: their sums of weights tell that nothing
  // was too large. Other tiles are multiplied again, as weights have taken the scores' place.
  template <bool kFirst>
  __device__ __forceinline__ bool Weigh(const TileRanges& ranges, int group, float (&factors)[2]) {
    const bool dense = ranges.Dense(group);
    float sums[2];
    bool exact = false;
    if (!kFirst && __builtin_expect(dense && sums_tell_, 1)) {
      TakeWeights(sums);
      if (__builtin_expect(!__any_sync(0xffffffffu, IsUnusual(sums[0], 0) | IsUnusual(sums[1], 1)),
                           1)) {
        LeaveKeys(/*read=*/false);
        AddSums(sums);
        return false;
      }
      exact = true;
    }
    float peaks[2];
    bool raise = true;
    if (!exact) {
      if (!dense) MaskScores(group);
      FindPeaks(peaks);
      raise = __any_sync(0xffffffffu, Exceeds(peaks[0], 0) || Exceeds(peaks[1], 1));
      exact = raise && __any_sync(0xffffffffu, IsLarge(peaks[0]) || IsLarge(peaks[1]));
    }
    if (exact) {
      MultiplyKeysExactly();
      if (!dense) MaskScores(group);
      FindPeaks(peaks);
    }
    LeaveKeys(/*read=*/exact);
    if (raise) {
      RaiseReferences(peaks, factors);
      if (!kFirst) FindUnits();
    }
    TakeWeights(sums);
    AddSums(sums);
    return raise;
  }
  // Weights in place of scores, and this lane's sums of them.
  __device__ __forceinline__ void TakeWeights(float (&sums)[2]) {
    const float offsets[2] = {Traits::kBias - reference_[0], Traits::kBias - reference_[1]};
    float chains[2][2];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int r = i / 2 % 2;
      float& chain = chains[r][i % 2];
      s_[i] = Exp2(fmaf(s_[i], scale_[r], offsets[r]));
      chain = i < 4 ? s_[i] : chain + s_[i];
    }
    sums[0] = chains[0][0] + chains[0][1];
    sums[1] = chains[1][0] + chains[1][1];
  }
  __device__ __forceinline__ void AddSums(const float (&sums)[2]) {
    sum_[0] += sums[0];
    sum_[1] += sums[1];
  }

  // Whether sums of a row's sixteen weights in a lane can tell that its logits are usual. With
  // references that are themselves nearly large they would hardly ever do.
  __device__ __forceinline__ void FindUnits() {
    bool near = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unit_[r] = Exp2(Traits::kBias - reference_[r]);
      near &= fabsf(reference_[r]) < Traits::kLargeLogit - 4.0f;
    }
    sums_tell_ = __all_sync(0xffffffffu, near);
  }
  // Whether f16 holds all weights, no logit is above kLargeLogit, and not all of them are below
  // -kLargeLogit, unless they are so far below the reference that they are nothing.
  __device__ __forceinline__ bool IsUnusual(float sum, int r) const {
    constexpr float kLargestF16 = 65504.0f;
    constexpr float kLargest = 1 << static_cast<int>(Traits::kLargeLogit);  // over a logit of 0
    constexpr float kNothing = 1.0f / (1 << static_cast<int>(Traits::kNegligible - Traits::kBias));
    const bool large = (sum > kLargestF16) | (sum * (1 / kLargest) > unit_[r]);
    const bool small = (sum * (kLargest / 16) < unit_[r]) & (sum > kNothing);
    return large | small;  // (NaN is not)
  }
  __device__ __forceinline__ void RaiseReferences(const float (&peaks)[2], float (&factors)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float peak = peaks[r];
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
      const float reference = fmaxf(reference_[r], peak);
      factors[r] = Exp2(reference_[r] - reference);
      reference_[r] = reference;
      sum_[r] *= factors[r];
    }
  }
  __device__ __forceinline__ void ScaleOutput(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) o_[i] *= factors[i / 2 % 2];
  }
  // A row's largest logits, of this lane's part.
  __device__ __forceinline__ void FindPeaks(float (&peaks)[2]) const {
    float chains[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& chain = chains[i / 2 % 2][i % 2];
      chain = fmaxf(chain, s_[i]);
    }
    peaks[0] = fmaxf(chains[0][0], chains[0][1]);
    peaks[1] = fmaxf(chains[1][0], chains[1][1]);
    peaks[0] *= scale_[0];
    peaks[1] *= scale_[1];
  }
  static __device__ __forceinline__ bool IsLarge(float logit) {
    return fabsf(logit) > Traits::kLargeLogit;
  }
  // Whether a logit of row r outgrows its reference, or is large and counts beside it.
  __device__ __forceinline__ bool Exceeds(float logit, int r) const {
    return logit > reference_[r] + (IsLarge(logit) ? -Traits::kNegligible : kHeadroom);
  }
  // Two of a query's elements, whole: its pieces add up to f16. They lie in a word of q_, which
  // kHigh names the half of.
  template <bool kHigh>
  __device__ __forceinline__ uint32_t WholeQuery(int step, int i) const {
    uint32_t whole = WidenE4M3<kHigh>(q_[0][step][i]);
    if constexpr (Traits::kPieces == 2) {
      whole = AddPairs(whole, WidenE4M3<kHigh>(q_[1][step][i]));
    }
    return whole;
  }
  // The scores of this warp's rows once more, as sums of f16 products in fp32.
  __device__ __forceinline__ void MultiplyKeysExactly() {
    const std::byte* keys = shared_.keys[warpgroup_][keys_.stage];
    const int row = lane_ / 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) s_[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < 2 * kSteps; ++step) {  // of 16 dimensions
      // A lane's four neighbouring dimensions are its slots of the sum, here as there.
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = WholeQuery<false>(step / 2, step % 2 * 2 + i);
        a[i + 2] = WholeQuery<true>(step / 2, step % 2 * 2 + i);
      }
      const std::byte* at = keys + step / 4 * (kTileGroups * Traits::kPanelBytes) +
                            row * kKeyPanelBytes + KeyChunk(row, step % 4) * kVectorBytes +
                            lane_ % 4 * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // eight rows of the panels
        const uint4 word = make_uint4(
            *reinterpret_cast<const uint32_t*>(at + j * (Traits::kPanelBytes / 2)), 0, 0, 0);
        uint32_t b0, b1;
        WidenQuad<Traits::kKv>(word, 0, b0, b1);
        float(&d)[4] = *reinterpret_cast<float(*)[4]>(&s_[j * 4]);
        Mma16x8x16<DType::kF16>(d, a, b0, b1);
      }
    }
  }
  // Puts -inf where a column may not see a slot. Rows 8j to 8j + 7 of the panels are tokens of
  // group j / 2 (KeyRow).
  __device__ __forceinline__ void MaskScores(int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowKeys keys = shared_.columns.keys[column_ + 8 * r];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int slot = (group + j / 2) * kGroupTokens + lane_ % 4 * 4 + j % 2 * 2 + c;
          if (slot < keys.begin || slot >= keys.end) s_[j * 4 + r * 2 + c] = -INFINITY;
        }
      }
    }
  }
  // Weights as operand A, in the order in which V is widened: the first eight rows of the panels of
  // each group, then the others.
  __device__ __forceinline__ void PackWeights() {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = step % 2 * 2 + i / 2;
        const float* s = s_ + (group * 2 + step / 2) * 4 + i % 2 * 2;
        p_[step][i] = Pack<DType::kF16>(s[0], s[1]);
      }
    }
  }

  const AttentionArgs& args_;
  Shared& shared_;
  const int lane_;
  const int warp_;
  const int warpgroup_;
  const int column_;  // the first of this thread's two; the other is eight further
  RingPlace<Traits::kKeyStages> keys_;
  RingPlace<Traits::kWideStages> values_;
  uint32_t q_[Traits::kPieces][kSteps][4];
  float s_[32];
  uint32_t p_[4][4];
  float o_[64];
  float own_[32];
  float lse2_[2];
  float scale_[2];
  float reference_[2];
  float sum_[2];
  float unit_[2];  // the weight of a logit of 0
  bool sums_tell_;
  uint32_t draft_parity_ = 0;
};

}  // namespace tributary::cuda
