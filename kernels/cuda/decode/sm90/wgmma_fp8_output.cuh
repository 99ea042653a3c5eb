// What a computing warpgroup of wgmma_fp8_attention.cuh makes of its sums when an item ends.
#pragma once

#include "kernels/cuda/decode/sm90/block_output.cuh"
#include "kernels/cuda/decode/sm90/wgmma_fp8_warpgroup.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// Adds up what the block's warpgroups found: each is left with half of the dimensions.
template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::Combine() {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = sum_[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane_ % 4 == 0) {
      shared_.sum[warpgroup_][packed_row_ + 8 * r] = sum;
      shared_.reference[warpgroup_][packed_row_ + 8 * r] = reference_[r];
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
template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::ExpectOfCluster(Shared& shared,
                                                                      const ClusterPlace& place) {
  constexpr uint32_t kPackedRowBytes = (Traits::kHeadDim + 1) * sizeof(float);
  const uint32_t own = Traits::kTileRows / place.size;
  if (place.size > 1) shared.published.Expect((Traits::kTileRows - own) * kPackedRowBytes);
}

// Writes the thread block's output, or the partial of its split.
template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::Store(const WorkItem& item) const {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x[kOwn / 2];
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) x[i] = own_[i / 2 * 4 + r * 2 + i % 2];
    StoreRow(RowOf(item, r), r, x, lse2_[r]);
  }
}

// The same of the cluster: its blocks share the packed rows out, and each is given what the others
// found of its own. The caller has waited for these to have read what they were given before.
template <typename Traits>
template <int kSize>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::MergeAndStore(const WorkItem& item,
                                                                    const ClusterPlace& place,
                                                                    uint32_t parity) const {
  constexpr int kOwnRows = Traits::kTileRows / kSize;
  constexpr int kRowVectors = 4 * kOwnRows;  // of a source, each vector of a lane
  const auto entry_of = [&](int r) {
    return OwnedPackedRow<kSize>::Index(packed_row_ + 8 * r) * 4 + lane_ % 4;
  };
  const auto owner_of = [&](int r) { return OwnedPackedRow<kSize>::Owner(packed_row_ + 8 * r); };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t owner = owner_of(r);
    if (warpgroup_ == 0 && lane_ % 4 == 0) {
      float* const lse2 = &shared_.block_lse2[place.rank][packed_row_ + 8 * r];
      if (owner == place.rank) {
        *lse2 = lse2_[r];
      } else {
        StoreAsyncIn(SharedAddressIn(lse2, owner), lse2_[r], shared_.published.AddressIn(owner));
      }
    }
    if (owner == place.rank) continue;
    const uint32_t source = place.rank - (place.rank > owner ? 1 : 0);
    const uint32_t to = SharedAddressIn(
        &shared_.inbox[warpgroup_][source * kVectors * kRowVectors + entry_of(r)], owner);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
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
    const int packed_row = packed_row_ + 8 * r;
    float max = kNoReference;
#pragma unroll
    for (int s = 0; s < kSize; ++s) max = fmaxf(max, shared_.block_lse2[s][packed_row]);
    float weights[kSize];
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kSize; ++s) {
      weights[s] = Exp2(shared_.block_lse2[s][packed_row] - max);
      sum += weights[s];
    }
    const float inverse = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    const float4* from = &shared_.inbox[warpgroup_][entry_of(r)];
    float x[kOwn / 2] = {};
#pragma unroll
    for (int s = 0; s < kSize; ++s) {
      const float weight = weights[s] * inverse;
      const bool own = s == static_cast<int>(place.rank);
      const int source = s - (s > static_cast<int>(place.rank) ? 1 : 0);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* mine = own_ + v * 8 + r * 2;
        float4 part = make_float4(mine[0], mine[1], mine[4], mine[5]);
        if (!own) part = from[(source * kVectors + v) * kRowVectors];
        x[v * 4] += weight * part.x;
        x[v * 4 + 1] += weight * part.y;
        x[v * 4 + 2] += weight * part.z;
        x[v * 4 + 3] += weight * part.w;
      }
    }
    StoreRow(rows[r], r, x, sum == 0.0f ? EmptyLse<float>() : max + __log2f(sum));
  }
}

// Of this thread's packed row r.
template <typename Traits>
__device__ __forceinline__ OutputRow Fp8Warpgroup<Traits>::RowOf(const WorkItem& item,
                                                                 int r) const {
  return RowOfOutput<Traits::kTileRows>(args_, item, packed_row_ + 8 * r);
}

// A packed row's half of the dimensions, two of every eight in a lane; of packed row r of this
// thread.
template <typename Traits>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::StoreRow(OutputRow row, int r,
                                                               const float (&x)[kOwn / 2],
                                                               float lse2) const {
  using Fragments = PartialFragments<Traits::kHeadDim>;
  static_assert(Traits::kTileRows * Traits::kHeadDim == Fragments::kFloats);
  if (row.index < 0) return;
  if (row.whole) {
    float* const to = args_.o + size_t(row.index) * Traits::kHeadDim +
                      warpgroup_ * (Traits::kHeadDim / 2) + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      StoreRelaxed(to + i * 8, make_float2(x[2 * i], x[2 * i + 1]));
    }
  } else {
    float* const to = args_.partial_o + size_t(row.index / Traits::kTileRows) * Fragments::kFloats +
                      Fragments::Of(threadIdx.x, r, 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      __stcg(reinterpret_cast<float4*>(to + Fragments::Of(0, 0, v)),
             make_float4(x[4 * v], x[4 * v + 1], x[4 * v + 2], x[4 * v + 3]));
    }
  }
  if (warpgroup_ == 0 && lane_ % 4 == 0) StoreLse(args_, row, lse2);
}

// Where a warpgroup leaves the half of its output that the other takes.
template <typename Traits>
__device__ __forceinline__ float4 (*Fp8Warpgroup<Traits>::Given(int warpgroup) const)[128] {
  return reinterpret_cast<float4(*)[128]>(shared_.wide[warpgroup][0]);
}

template <typename Traits>
template <int kGiven>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::Give() const {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float* x = o_ + kGiven * kOwn + i;
    Given(warpgroup_)[i / 4][thread] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <typename Traits>
template <int kGiven>
__device__ __forceinline__ void Fp8Warpgroup<Traits>::Take() {
  constexpr int kKept = 1 - kGiven;
  const int thread = threadIdx.x % 128;
  float kept[2], added[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int c = packed_row_ + 8 * r;
    const PackedRowSum sum = SumOfWarpgroups({shared_.sum[0][c], shared_.sum[1][c]},
                                             {shared_.reference[0][c], shared_.reference[1][c]},
                                             shared_.v_scale, Traits::kBias);
    kept[r] = sum.factors[1 - kGiven];
    added[r] = sum.factors[kGiven];
    lse2_[r] = sum.lse2;
  }
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float4 given = Given(kGiven)[i / 4][thread];
    const float x[4] = {given.x, given.y, given.z, given.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      own_[i + e] = o_[kKept * kOwn + i + e] * kept[e / 2] + x[e] * added[e / 2];
    }
  }
}

}  // namespace tributary::cuda
