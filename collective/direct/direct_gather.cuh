// Merged heads on their way to rank 0: the second hop of an exchange, and the whole of a gather.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/direct/direct_kernel.h"
#include "collective/direct/direct_protocol.cuh"
#include "collective/direct/peer_words.cuh"

namespace tributary::collective::direct {

// Rank 0: merged heads of the other ranks into its output, a packet of each at a time. Each packet
// is read, and cleared, by one thread.
template <int kRanks>
inline __device__ void ReceiveMerged(const DirectArgs& a, uint32_t step) {
  const int movers = static_cast<int>(blockDim.x) - kWarp;
  const int unit_bytes = a.value_dim * a.OutBytes();
  const int packets = unit_bytes / kDirectPacket;
  for (int q = threadIdx.x; q < a.plan.units * packets; q += movers) {
    const int unit = q / packets;
    const int packet = q - unit * packets;
    const bool with_lse = packet == 0;
    uint32_t senders = 0;
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      if (r < a.layout.ranks && unit < UnitsFor(a, r).count) senders |= 1u << r;
    }
    uint4 data[kRanks];
    uint32_t lse[kRanks];
    uint32_t missing = senders;
    Patience patience;
    while (missing != 0) {
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        const Box box = BoxOf(a, DirectStage::kMerged, step, r);
        const std::byte* inbox = a.memory[a.rank] + box.at;
        data[r] = LoadPacket(inbox + static_cast<size_t>(q) * kDirectPacket);
        lse[r] = with_lse ? LoadWord(inbox + box.lse_bytes + 4 * unit) : 0;
      }
#pragma unroll
      for (int r = 1; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        if (Arrived(data[r]) && lse[r] != kNotArrived) missing &= ~(1u << r);
      }
      if (missing != 0 && patience.Ended(a, missing)) return;
    }
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      if ((senders >> r & 1) == 0) continue;
      const Box box = BoxOf(a, DirectStage::kMerged, step, r);
      std::byte* const inbox = a.memory[a.rank] + box.at;
      StorePacket(inbox + static_cast<size_t>(q) * kDirectPacket, NothingArrived());
      if (with_lse) StoreWord(inbox + box.lse_bytes + 4 * unit, kNotArrived);
      const Units units = UnitsFor(a, r);
      const size_t pair = PairOf(a, units.slice, units.first + unit);
      *reinterpret_cast<uint4*>(static_cast<std::byte*>(a.out) + pair * unit_bytes +
                                packet * kDirectPacket) = data[r];
      if (with_lse && a.lse_out != nullptr) a.lse_out[pair] = __uint_as_float(lse[r]);
    }
  }
}

// Packets [from, ...) of this rank's slice to rank 0, or into its output where this is rank 0.
inline __device__ void SendMerged(const DirectArgs& a, uint32_t step) {
  const int movers = static_cast<int>(blockDim.x) - kWarp;
  const int unit_bytes = a.value_dim * a.OutBytes();
  const int packets = unit_bytes / kDirectPacket;
  const Units units = UnitsFor(a, a.rank);
  const Box box = BoxOf(a, DirectStage::kMerged, step, a.rank);
  std::byte* const root = a.memory[0] + box.at;
  for (int q = threadIdx.x; q < units.count * packets; q += movers) {
    const int unit = q / packets;
    const int packet = q - unit * packets;
    const size_t slice_unit = units.first + unit;
    const uint4 x = *reinterpret_cast<const uint4*>(
        static_cast<const std::byte*>(a.o) + slice_unit * unit_bytes + packet * kDirectPacket);
    const float lse = packet == 0 && a.lse != nullptr ? a.lse[slice_unit] : 0.0f;
    if (a.rank != 0) {
      StorePacket(root + static_cast<size_t>(q) * kDirectPacket, Sendable(x));
      if (packet == 0) {
        StoreWord(root + box.lse_bytes + 4 * unit, Sendable(__float_as_uint(lse)));
      }
      continue;
    }
    const size_t pair = PairOf(a, units.slice, units.first + unit);
    *reinterpret_cast<uint4*>(static_cast<std::byte*>(a.out) + pair * unit_bytes +
                              packet * kDirectPacket) = x;
    if (packet == 0 && a.lse_out != nullptr) a.lse_out[pair] = lse;
  }
}

}  // namespace tributary::collective::direct
