// How the thread blocks of a cluster merge what they computed for one item: each its share of the
// packed rows. Either a block loads what the others have in their shared memory, or they send it.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/ptx/cluster.cuh"

namespace tributary::cuda {

// A packed row of the share that a thread block merges.
struct ShareRow {
  int packed_row;
  int in_share;  // counted from the share's first
};

// Merges what the thread blocks of a cluster computed for one item. Every block merges its share of
// the packed rows, one block's behind another's, and hands them to store(packed_row, d, part).
// load_lse(row, block) and load_o(row, d, block) give what a block of the cluster has of a
// ShareRow: its LSE in base 2, and dimensions d to d + 3 of its normalised output.
template <int kValueDim, int kTileRows, int kThreads, typename LoadLse, typename LoadO,
          typename Store>
__device__ __forceinline__ void MergeShare(const ClusterPlace& place, LoadLse load_lse,
                                           LoadO load_o, Store store) {
  static_assert(kValueDim % 4 == 0);
  constexpr int kUnits = kValueDim / 4;  // of a packed row
  const auto merge = [&]<int kSize>(std::integral_constant<int, kSize>) {
    constexpr int kOfBlock = kTileRows / kSize * kUnits;
    constexpr int kOfThread = (kOfBlock + kThreads - 1) / kThreads;
    // Whether every thread that goes on has a unit in every round.
    constexpr bool kFull = kOfBlock < kThreads || kOfBlock % kThreads == 0;
    const auto unit_of = [&](int u) {
      const int unit = u * kThreads + static_cast<int>(threadIdx.x);
      return kFull ? unit : min(unit, kOfBlock - 1);
    };
    const auto row_of = [&](int u) {
      const int in_share = unit_of(u) / kUnits;
      return ShareRow{static_cast<int>(place.rank) * (kTileRows / kSize) + in_share, in_share};
    };
    // It is the same in every round if a round takes whole packed rows.
    [[maybe_unused]] const int own_dim = threadIdx.x % kUnits * 4;
    const auto dim_of = [&](int u) {
      if constexpr (kThreads % kUnits == 0) {
        return own_dim;
      } else {
        return unit_of(u) % kUnits * 4;
      }
    };
    if (kOfBlock < kThreads && threadIdx.x >= kOfBlock) return;
    PackedRowPart merged[kOfThread];
    MergeParts<kOfThread, kSize>(
        kSize, [&](int u, int i) { return load_lse(row_of(u), i); },
        [&](int u, int i) { return load_o(row_of(u), dim_of(u), i); }, merged);
#pragma unroll
    for (int u = 0; u < kOfThread; ++u) {
      if (!kFull && u * kThreads + static_cast<int>(threadIdx.x) >= kOfBlock) continue;
      store(row_of(u).packed_row, dim_of(u), merged[u]);
    }
  };
  if (place.size == 2) merge(std::integral_constant<int, 2>{});
  if (place.size == 4) merge(std::integral_constant<int, 4>{});
  if (place.size == 8) merge(std::integral_constant<int, 8>{});
  static_assert(kMaxClusterSize == 8);
}

// The same where `o` and `lse2` lie at the same place in the shared memory of each block, from
// which they are loaded. The blocks meet before and after.
template <int kValueDim, int kTileRows, int kThreads, typename Store>
__device__ __forceinline__ void MergeCluster(const ClusterPlace& place,
                                             const float (*o)[kValueDim + 4], const float* lse2,
                                             Store store) {
  MergeShare<kValueDim, kTileRows, kThreads>(
      place,
      [&](ShareRow row, int i) { return LoadFloatIn(SharedAddressIn(lse2 + row.packed_row, i)); },
      [&](ShareRow row, int d, int i) {
        return LoadFloat4In(SharedAddressIn(&o[row.packed_row][d], i));
      },
      store);
}

// Where a block is sent what the blocks of its cluster, itself included, have of the packed rows
// that it merges. It lies at the same place in the shared memory of each block.
//
// Sending is one way: loads from other blocks would wait for a barrier of the cluster and then for
// a round trip, and that barrier for everything that a block has stored to global memory.
template <int kValueDim, int kTileRows>
class ClusterInbox {
 public:
  // By one thread, before the cluster's first meeting.
  __device__ __forceinline__ void Init() {
    come_.Init();
    FenceBarrierInit();
  }
  // By one thread, once per item of `packed_count` packed rows.
  __device__ __forceinline__ void Expect(const ClusterPlace& place, int packed_count) {
    const int share = kTileRows >> place.SizeLog2();
    const int rows = min(max(packed_count - static_cast<int>(place.rank) * share, 0), share);
    constexpr int kRowBytes = (kValueDim + 1) * static_cast<int>(sizeof(float));
    come_.Expect(static_cast<uint32_t>(rows * kRowBytes) << place.SizeLog2());
  }
  // Sends dimensions d to d + 3 of a packed row of this block's normalised output and, with d = 0,
  // its LSE in base 2 to the block that merges the row. All inboxes of the cluster must be free.
  __device__ __forceinline__ void Send(const ClusterPlace& place, int packed_row, int d, float4 o,
                                       float lse2) {
    const int share_log2 = kTileRowsLog2 - place.SizeLog2();
    const auto to = static_cast<uint32_t>(packed_row >> share_log2);
    const int in_share = packed_row & ((1 << share_log2) - 1);
    const int row = (static_cast<int>(place.rank) << share_log2) + in_share;
    const uint32_t come = come_.AddressIn(to);
    StoreAsyncIn(SharedAddressIn(&o_[row][d], to), o, come);
    if (d == 0) StoreAsyncIn(SharedAddressIn(&lse2_[row], to), lse2, come);
  }
  // Waits for what is expected, in the phase of this parity, and merges it (MergeShare). All
  // threads call it. The inbox is free when they have returned.
  template <int kThreads, typename Store>
  __device__ __forceinline__ void Merge(const ClusterPlace& place, uint32_t parity, Store store) {
    come_.Wait(parity);
    const int share = kTileRows >> place.SizeLog2();
    MergeShare<kValueDim, kTileRows, kThreads>(
        place, [&](ShareRow row, int block) { return lse2_[block * share + row.in_share]; },
        [&](ShareRow row, int d, int block) {
          return *reinterpret_cast<const float4*>(&o_[block * share + row.in_share][d]);
        },
        store);
  }

 private:
  static constexpr int kTileRowsLog2 = std::bit_width(unsigned{kTileRows}) - 1;
  static_assert(1 << kTileRowsLog2 == kTileRows && kTileRows >= kMaxClusterSize);

  // The share's packed rows as one block has them, behind those of the block before it.
  alignas(16) float o_[kTileRows][kValueDim];
  float lse2_[kTileRows];
  InboxBarrier come_;
};

}  // namespace tributary::cuda
