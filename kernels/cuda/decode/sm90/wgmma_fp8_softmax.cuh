// How a computing warpgroup of wgmma_fp8_attention.cuh weighs the scores of a tile.
#pragma once

#include "kernels/cuda/decode/sm90/wgmma_fp8_warpgroup.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// Turns a group's raw products into weights, in place, and leaves its keys. Returns whether
// references were raised, and by which factors O is to be multiplied then.
template <typename Traits>
template <bool kFirst, int kTiles>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::Weigh(const TileRanges& ranges, int strip,
                                                            int apart, float (&factors)[2]) {
  bool dense = ranges.Dense(strip);
  if constexpr (kTiles == 2) dense &= ranges.Dense(strip + apart);
  if constexpr (OfNvfp4<Traits>) {
    // Products of f16 are exact enough whatever the logits.
    float sums[2];
    if (!dense) MaskScores<kTiles>(strip, apart);
    LeaveKeys<kTiles>(/*read=*/false);
    float peaks[2];
    FindPeaks<kTiles>(peaks);
    const bool raise = __any_sync(
        0xffffffffu, peaks[0] > reference_[0] + kHeadroom || peaks[1] > reference_[1] + kHeadroom);
    if (raise) RaiseReferences(peaks, factors);
    TakeWeights<kTiles>(sums);
    AddSums(sums);
    return raise;
  } else {
    return WeighAsTold<kFirst, kTiles>(strip, apart, dense, factors);
  }
}

// The same of FP8. Most groups are weighed without a look at their logits: their sums of weights
// tell that nothing was too large. Other groups are multiplied again, as weights have taken the
// scores' place.
template <typename Traits>
template <bool kFirst, int kTiles>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::WeighAsTold(int strip, int apart, bool dense,
                                                                  float (&factors)[2]) {
  float sums[2];
  bool exact = false;
  if (!kFirst && __builtin_expect(dense && sums_tell_, 1)) {
    TakeWeights<kTiles>(sums);
    if (__builtin_expect(
            !__any_sync(0xffffffffu, IsUnusual<kTiles>(sums[0], 0) | IsUnusual<kTiles>(sums[1], 1)),
            1)) {
      LeaveKeys<kTiles>(/*read=*/false);
      AddSums(sums);
      return false;
    }
    exact = true;
  }
  float peaks[2];
  bool raise = true;
  if (!exact) {
    if (!dense) MaskScores<kTiles>(strip, apart);
    FindPeaks<kTiles>(peaks);
    raise = __any_sync(0xffffffffu, Exceeds(peaks[0], 0) || Exceeds(peaks[1], 1));
    exact = raise && __any_sync(0xffffffffu, IsLarge(peaks[0]) || IsLarge(peaks[1]));
  }
  if (exact) {
    MultiplyKeysExactly<kTiles>();
    if (!dense) MaskScores<kTiles>(strip, apart);
    FindPeaks<kTiles>(peaks);
  }
  LeaveKeys<kTiles>(/*read=*/exact);
  if (raise) {
    RaiseReferences(peaks, factors);
    if (!kFirst) FindUnits();
  }
  TakeWeights<kTiles>(sums);
  AddSums(sums);
  return raise;
}

// Weights in place of scores, and this lane's sums of them.
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::TakeWeights(float (&sums)[2]) {
  const float offsets[2] = {Traits::kBias - reference_[0], Traits::kBias - reference_[1]};
  float chains[2][2];
#pragma unroll
  for (int i = 0; i < kTiles * 32; ++i) {
    const int r = i / 2 % 2;
    float& chain = chains[r][i % 2];
    float& s = s_[i / 32][i % 32];
    s = Exp2(fmaf(s, scale_[r], offsets[r]));
    chain = i < 4 ? s : chain + s;
  }
  sums[0] = chains[0][0] + chains[0][1];
  sums[1] = chains[1][0] + chains[1][1];
}

template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::AddSums(const float (&sums)[2]) {
  sum_[0] += sums[0];
  sum_[1] += sums[1];
}

// Whether sums of a row's weights in a lane can tell that its logits are usual. With
// references that are themselves nearly large they would hardly ever do.
template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::FindUnits() {
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
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::IsUnusual(float sum, int r) const {
  constexpr float kLargestF16 = 65504.0f;
  constexpr float kLargest = 1 << static_cast<int>(Traits::kLargeLogit);  // over a logit of 0
  constexpr float kNothing = 1.0f / (1 << static_cast<int>(Traits::kNegligible - Traits::kBias));
  const bool large = (sum > kLargestF16) | (sum * (1 / kLargest) > unit_[r]);
  const bool small = (sum * (kLargest / (kTiles * 16)) < unit_[r]) & (sum > kNothing);
  return large | small;  // NaN compares as neither
}

template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::RaiseReferences(const float (&peaks)[2],
                                                                      float (&factors)[2]) {
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

// A row's largest logits, of this lane's part.
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::FindPeaks(float (&peaks)[2]) const {
  float chains[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
  for (int i = 0; i < kTiles * 32; ++i) {
    float& chain = chains[i / 2 % 2][i % 2];
    chain = fmaxf(chain, s_[i / 32][i % 32]);
  }
  peaks[0] = fmaxf(chains[0][0], chains[0][1]);
  peaks[1] = fmaxf(chains[1][0], chains[1][1]);
  peaks[0] *= scale_[0];
  peaks[1] *= scale_[1];
}

template <typename Traits>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::IsLarge(float logit) {
  return fabsf(logit) > Traits::kLargeLogit;
}

// Whether a logit of row r outgrows its reference, or is large and counts beside it.
template <typename Traits>
__device__ __forceinline__ bool Fp8Warpgroup<Traits>::Exceeds(float logit, int r) const {
  return logit > reference_[r] + (IsLarge(logit) ? -Traits::kNegligible : kHeadroom);
}

// Two of a query's elements, whole: its pieces add up to f16. They lie in a word of q_, which
// kHigh names the half of.
template <typename Traits>
template <bool kHigh>
__device__ __forceinline__ uint32_t Fp8Warpgroup<Traits>::WholeQuery(int step, int i) const {
  uint32_t whole = WidenE4M3<kHigh>(q_[0][step][i]);
  if constexpr (Traits::kPieces == 2) {
    whole = AddPairs(whole, WidenE4M3<kHigh>(q_[1][step][i]));
  }
  return whole;
}

// The scores of this warp's rows with a group once more, as sums of f16 products in fp32.
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::MultiplyKeysExactly() {
  RingPlace<Traits::kKeyStages> at = keys_;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile, at.Advance()) {
    MultiplyExactly(shared_.keys[warpgroup_][at.stage], s_[tile]);
  }
}

template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::MultiplyExactly(const std::byte* keys,
                                                                      float (&s)[32]) const {
  const int row = lane_ / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < 2 * kSteps; ++step) {  // of 16 dimensions
    // A lane's four neighbouring dimensions are its slots of the sum, here as there.
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = WholeQuery<false>(step / 2, step % 2 * 2 + i);
      a[i + 2] = WholeQuery<true>(step / 2, step % 2 * 2 + i);
    }
    const std::byte* at = keys + step / 4 * (kTileStrips * Traits::kPanelBytes) +
                          row * kKeyPanelBytes + KeyChunk(row, step % 4) * kVectorBytes +
                          lane_ % 4 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // eight rows of the panels
      const uint4 word = make_uint4(
          *reinterpret_cast<const uint32_t*>(at + j * (Traits::kPanelBytes / 2)), 0, 0, 0);
      uint32_t b0, b1;
      WidenQuad<Traits::kKv>(word, 0, b0, b1);
      float(&d)[4] = *reinterpret_cast<float(*)[4]>(&s[j * 4]);
      Mma16x8x16<DType::kF16>(d, a, b0, b1);
    }
  }
}

// Puts -inf where a packed row may not see a slot. Rows 8j to 8j + 7 of a tile's panels are tokens
// of strip j / 2 (KeyRow).
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::MaskScores(int strip, int apart) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowKeys keys = shared_.packed_rows.keys[packed_row_ + 8 * r];
#pragma unroll
    for (int i = 0; i < kTiles * 16; ++i) {
      const int tile = i / 16;
      const int j = i / 2 % 8;
      const int c = i % 2;
      const int slot = (strip + tile * apart + j / 2) * kStripSlots + lane_ % 4 * 4 + j % 2 * 2 + c;
      if (slot < keys.begin || slot >= keys.end) s_[tile][j * 4 + r * 2 + c] = -INFINITY;
    }
  }
}

// Weights as operand A, in the order in which V is widened: the first eight rows of the panels of
// each strip, then the others.
template <typename Traits>
template <int kTiles>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::PackWeights() {
#pragma unroll
  for (int step = 0; step < kTiles * 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int strip = step % 2 * 2 + i / 2;
      const float* s = s_[step / 4] + (strip * 2 + step % 4 / 2) * 4 + i % 2 * 2;
      p_[step][i] = Pack<DType::kF16>(s[0], s[1]);
    }
  }
}

}  // namespace tributary::cuda
