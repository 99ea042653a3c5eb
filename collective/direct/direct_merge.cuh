// One thread block's share in the exchange of partials: it sends its rank's partial to the ranks
// that merge it, receives the partials of its own heads, merges them and delivers the result.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "collective/direct/direct_elements.cuh"
#include "collective/direct/direct_kernel.h"
#include "collective/direct/direct_protocol.cuh"
#include "collective/direct/peer_words.cuh"
#include "kernels/lse.h"

namespace tributary::collective::direct {

// kArrives: DirectArgs::partial_arrives.
template <DType kIn, DType kWire, int kRanks, bool kArrives>
class PartialExchange {
 public:
  using E = Element<kIn, kWire>;
  static constexpr int kCount = E::kCount;

  __device__ PartialExchange(const DirectArgs& a, uint32_t step)
      : a_(a),
        step_(step),
        workers_(static_cast<int>(blockDim.x) - kWarp),
        packets_(a.value_dim / kCount),
        lse_bytes_(static_cast<size_t>(a.plan.units) * packets_ * kDirectPacket) {}

  // Whether any rank gets something of this one: when rank 0 gets all in one hop, it sends nothing.
  __device__ __forceinline__ bool Sends() const {
    return a_.plan.route != DirectRoute::kOneHop || a_.rank != 0;
  }

  // What this thread sends first, fetched while the bookkeeping waits for its answer. False when it
  // did not come.
  __device__ __forceinline__ bool Fetch(int q) {
    const int unit = q / packets_;
    const int packet = q - unit * packets_;
    int32_t heads = 0;  // of the slice that `row` was found for: slices are nearly all alike
    int32_t row = 0;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      if (i >= a_.layout.ranks) continue;
      const Units units = UnitsFor(a_, Peer(i));
      if (unit >= units.count) continue;
      const int32_t of_slice = units.first + unit;
      if (units.slice.count != heads) {
        heads = units.slice.count;
        row = of_slice / heads;
      }
      const size_t pair =
          static_cast<size_t>(row) * a_.heads + units.slice.begin + (of_slice - row * heads);
      if (!LoadOwn(pair, packet, &fetched_[i - 1])) return false;
    }
    return true;
  }

  __device__ __forceinline__ void SendAll() {
    const int total = a_.plan.units * packets_;
    for (int q = threadIdx.x; q < total;) {
      const int unit = q / packets_;
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        if (i >= a_.layout.ranks) continue;
        const int peer = Peer(i);
        if (unit >= UnitsFor(a_, peer).count) continue;
        StorePacket(a_.memory[peer] + Inbox(a_.rank) + static_cast<size_t>(q) * kDirectPacket,
                    Sendable(fetched_[i - 1]));
      }
      q += workers_;
      if (q < total && !Fetch(q)) return;
    }
  }

  // By the bookkeeping warp: few words, each as urgent as the data. False when some did not come.
  __device__ __forceinline__ bool SendLse() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int r = 0; r < a_.layout.ranks; ++r) {
      if (r == a_.rank) continue;
      const Units units = UnitsFor(a_, r);
      for (int unit = lane; unit < units.count; unit += kWarp) {
        const size_t pair = PairOf(a_, units.slice, units.first + unit);
        uint32_t lse;
        if (!LoadOwnLse(pair, &lse)) return false;
        StoreWord(a_.memory[r] + Inbox(a_.rank) + lse_bytes_ + 4 * unit, Sendable(lse));
      }
    }
    return true;
  }

  __device__ __forceinline__ void ReceiveAndMerge() {
    const Units units = UnitsFor(a_, a_.rank);
    const int total = units.count * packets_;
    for (int q = threadIdx.x; q < total; q += workers_) {
      if (!ReceiveOne(units, q)) break;
    }
    // LSEs are read by all threads of a unit, so they are cleared when all are done.
    SyncWorkers();
    for (int i = threadIdx.x; i < units.count * a_.layout.ranks; i += workers_) {
      const int source = i / units.count;
      const int unit = i - source * units.count;
      if (source != a_.rank) {
        StoreWord(Memory() + Inbox(source) + lse_bytes_ + 4 * unit, kNotArrived);
      } else if (kArrives) {
        StoreWord(a_.lse + PairOf(a_, units.slice, units.first + unit), kNotArrived);
      }
    }
  }

 private:
  // The i-th rank after this one: ranks begin with different peers, so that no link is flooded.
  __device__ __forceinline__ int Peer(int i) const {
    const int r = a_.rank + i;
    return r < a_.layout.ranks ? r : r - a_.layout.ranks;
  }
  __device__ __forceinline__ std::byte* Memory() const { return a_.memory[a_.rank]; }
  __device__ __forceinline__ size_t Inbox(int source) const {
    return a_.layout.inbox(DirectStage::kPartials, step_ % kDirectSlots, source,
                           static_cast<int>(blockIdx.x));
  }

  // What is known of a packet of this rank's own partial while it arrives.
  struct Own {
    std::byte* at;
    typename E::Raw raw;
    __device__ __forceinline__ void Look() {
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) raw.part[i] = LoadPacket(at + i * kDirectPacket);
    }
    __device__ __forceinline__ bool Came() const {
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) arrived &= Arrived(raw.part[i]);
      return arrived;
    }
    __device__ __forceinline__ void Clear() const {
#pragma unroll
      for (int i = 0; i < E::kParts; ++i) StorePacket(at + i * kDirectPacket, NothingArrived());
    }
  };
  __device__ __forceinline__ Own OwnAt(size_t pair, int packet) const {
    const size_t element = pair * a_.value_dim + packet * kCount;
    return {const_cast<std::byte*>(E::Place(a_.o, element))};
  }

  // A packet to send. False when it was waited for in vain.
  __device__ __forceinline__ bool LoadOwn(size_t pair, int packet, uint4* out) const {
    if (!kArrives) {
      *out = E::Packet(E::Load(a_.o, pair * a_.value_dim + packet * kCount));
      return true;
    }
    Own own = OwnAt(pair, packet);
    Patience patience;
    for (own.Look(); !own.Came(); own.Look()) {
      if (patience.Ended(a_, 1u << a_.rank)) return false;
      __nanosleep(kNapNanoseconds);
    }
    own.Clear();
    *out = E::Packet(own.raw);
    return true;
  }

  // Its LSE, likewise.
  __device__ __forceinline__ bool LoadOwnLse(size_t pair, uint32_t* out) const {
    if (!kArrives) {
      *out = __float_as_uint(a_.lse[pair]);
      return true;
    }
    Patience patience;
    while ((*out = LoadWord(a_.lse + pair)) == kNotArrived) {
      if (patience.Ended(a_, 1u << a_.rank)) return false;
      __nanosleep(kNapNanoseconds);
    }
    StoreWord(a_.lse + pair, kNotArrived);
    return true;
  }

  // One packet of every rank.
  __device__ __forceinline__ bool ReceiveOne(const Units& units, int q) {
    const int unit = q / packets_;
    const int packet = q - unit * packets_;
    const size_t pair = PairOf(a_, units.slice, units.first + unit);
    uint4 data[kRanks];
    uint32_t lse[kRanks];
    uint32_t missing = 0;
    Own own = OwnAt(pair, packet);
    const float sink = a_.sinks == nullptr ? EmptyLse<float>() : a_.sinks[pair % a_.heads];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      if (r == a_.rank && !kArrives) {
        data[r] = E::Packet(E::Load(a_.o, pair * a_.value_dim + packet * kCount));
        lse[r] = __float_as_uint(a_.lse[pair]);
      } else {
        missing |= 1u << r;
      }
    }
    Patience patience;
    while (true) {
      // All that is missing is on its way before any of it is looked at.
      if (kArrives && (missing >> a_.rank & 1) != 0) own.Look();
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        if (r == a_.rank) {
          lse[r] = LoadWord(a_.lse + pair);
          continue;
        }
        const std::byte* inbox = Memory() + Inbox(r);
        data[r] = LoadPacket(inbox + static_cast<size_t>(q) * kDirectPacket);
        lse[r] = LoadWord(inbox + lse_bytes_ + 4 * unit);
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if ((missing >> r & 1) == 0) continue;
        bool arrived = false;
        if (r == a_.rank) {
          arrived = own.Came();
          data[r] = E::Packet(own.raw);
        } else {
          arrived = Arrived(data[r]);
        }
        if (arrived && lse[r] != kNotArrived) missing &= ~(1u << r);
      }
      if (missing == 0) break;
      if (patience.Ended(a_, missing)) return false;
      if ((missing >> a_.rank & 1) != 0) __nanosleep(kNapNanoseconds);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks || r == a_.rank) continue;
      StorePacket(Memory() + Inbox(r) + static_cast<size_t>(q) * kDirectPacket, NothingArrived());
    }
    if (kArrives) own.Clear();
    float x[kCount];
    const float merged = MergeAll(data, lse, sink, x);
    Deliver(unit, packet, units.first + unit, pair, x, merged);
    return true;
  }

  // Merges the partials of all ranks, in rank order. Returns the LSE of the union.
  __device__ __forceinline__ float MergeAll(const uint4 (&data)[kRanks],
                                            const uint32_t (&lse)[kRanks], float sink,
                                            float (&x)[kCount]) const {
    UnionLse<float> of_all;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      of_all.See(__uint_as_float(lse[r]));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r >= a_.layout.ranks) continue;
      const float weight = of_all.WeightOf(__uint_as_float(lse[r]));
      if (weight == 0.0f) continue;
      float o[kCount];
      E::Widen(data[r], o);
      of_all.Add(weight);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] += weight * o[i];
    }
    const float merged = of_all.Lse();
    float scale = of_all.Scale();
    if (a_.sinks != nullptr && !of_all.empty()) scale *= SinkScale(merged, sink);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= scale;
    return merged;
  }

  // `unit` counts within the block, `slice_unit` within the rank's heads, `pair` among all heads.
  __device__ __forceinline__ void Deliver(int unit, int packet, int32_t slice_unit, size_t pair,
                                          const float (&x)[kCount], float lse) {
    const Words<kCount> words = EncodeOutput(x, a_.out_dtype);
    const auto size = static_cast<size_t>(a_.OutBytes());
    const size_t in_unit = static_cast<size_t>(packet) * kCount * size;
    const size_t unit_bytes = a_.value_dim * size;
    if (a_.plan.route == DirectRoute::kTwoHops && a_.rank != 0) {
      const Box box = BoxOf(a_, DirectStage::kMerged, step_, a_.rank);
      std::byte* const root = a_.memory[0] + box.at;
      Send(root + unit * unit_bytes + in_unit, words);
      if (packet == 0) {
        StoreWord(root + box.lse_bytes + 4 * unit, Sendable(__float_as_uint(lse)));
      }
      return;
    }
    const size_t at = a_.plan.route == DirectRoute::kScatter ? slice_unit : pair;
    StoreLocal(static_cast<std::byte*>(a_.out) + at * unit_bytes + in_unit, words);
    if (packet == 0 && a_.lse_out != nullptr) a_.lse_out[at] = lse;
  }

  const DirectArgs& a_;
  const uint32_t step_;
  const int workers_;
  const int packets_;          // of a unit
  const size_t lse_bytes_;     // from a box's start to its LSEs
  uint4 fetched_[kRanks - 1];  // for the ranks after this one
};

}  // namespace tributary::collective::direct
