// The memory that ranks of a direct exchange write into each other, and how a call is cut for it.
//
// A *channel* is what one thread block of every rank uses; blocks of the same number on all ranks
// talk to each other and to no others, so nothing is counted or waited for across blocks. Every
// channel has two *slots* that its steps take in turn, and in each slot a place for every source.
// There are two *stages*: partials on their way to the rank that merges them, and merged heads on
// their way to rank 0 (whose memory alone has the second).
//
// A word that has not arrived reads kNotArrived. Senders never send that word, receivers put it
// back once they have read, so every word says for itself whether it is there: no flag, no fence
// between data and flag, and no byte more on the wire than the data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/device/device_exchange.h"
#include "collective/exchange/head_slice.h"
#include "collective/exchange/strategy.h"
#include "kernels/dtype.h"
#include "kernels/key_range.h"  // TRIBUTARY_HOST_DEVICE

namespace tributary::collective {

inline constexpr int kMaxDirectRanks = 8;
inline constexpr int kDirectChannels = 256;
inline constexpr int kDirectSlots = 2;
inline constexpr int kDirectPacket = 16;  // bytes that a thread stores at once

// A word that has not arrived. Read as any type that travels (one f32, or two bf16 or f16) it is a
// NaN, and so is kOtherNan, which is sent instead when the data itself holds that word.
inline constexpr uint32_t kNotArrived = 0xffffffffu;
inline constexpr uint32_t kOtherNan = 0x7fff7fffu;

enum class DirectStage : uint8_t { kPartials, kMerged };

// Byte offsets into a rank's memory.
struct DirectLayout {
  int32_t ranks = 1;
  size_t channel_bytes = 0;  // of one source, slot and stage; a multiple of 128

  // The word that says what broke the group (DirectFailureWord), 0 while it is whole.
  TRIBUTARY_HOST_DEVICE constexpr size_t failure() const { return 0; }
  // The first failure that this rank found. No peer writes it.
  TRIBUTARY_HOST_DEVICE constexpr size_t first_failure() const { return 64; }
  // Not 0 once rank `source` will not write to this rank's memory any more.
  TRIBUTARY_HOST_DEVICE constexpr size_t closed(int source) const { return 128 + 4 * source; }
  // Steps that this rank has begun on a channel.
  TRIBUTARY_HOST_DEVICE constexpr size_t step(int channel) const { return 256 + 4 * channel; }
  // Steps that rank `source` has begun on a channel, as it told this rank.
  TRIBUTARY_HOST_DEVICE constexpr size_t credit(int channel, int source) const {
    return step(kDirectChannels) + 4 * (channel * kMaxDirectRanks + source);
  }
  TRIBUTARY_HOST_DEVICE constexpr size_t control_bytes() const {
    return credit(kDirectChannels, 0);
  }
  TRIBUTARY_HOST_DEVICE constexpr size_t inbox(DirectStage stage, uint32_t slot, int source,
                                               int channel) const {
    const size_t place = ((static_cast<size_t>(stage) * kDirectSlots + slot) * ranks + source);
    return control_bytes() + (place * kDirectChannels + channel) * channel_bytes;
  }
  constexpr size_t bytes(int rank) const {
    return inbox(rank == 0 ? DirectStage{2} : DirectStage::kMerged, 0, 0, 0);
  }
};
static_assert(DirectLayout{}.control_bytes() % 128 == 0);

enum class DirectRoute : uint8_t {
  kScatter,  // every rank merges its heads
  kOneHop,   // rank 0 merges all heads
  kTwoHops,  // every rank merges its heads and sends the result on to rank 0
  kGather,   // merged heads go to rank 0
};

struct DirectShape {
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  Placement placement = Placement::kGathered;
  bool merged = false;  // nothing to merge: GatherSlices
  DType wire = DType::kBf16;
  DType out = DType::kBf16;
};

// The shape of a call.
DirectShape DirectShapeOf(const DeviceExchangeParams& params);
DirectShape DirectShapeOf(const DeviceGatherParams& params);

// How a call is cut into thread blocks. A unit is one row and head: value_dim elements of O and an
// LSE.
struct DirectPlan {
  DirectRoute route = DirectRoute::kScatter;
  int32_t blocks = 1;
  int32_t movers = 128;  // threads of a block that move data; another warp does the bookkeeping
  int32_t units = 0;     // the most that one thread block sends to one destination
};

// Heads that a rank merges (or, of kGather, has merged).
TRIBUTARY_HOST_DEVICE constexpr HeadSlice DirectSlice(DirectRoute route, int32_t heads,
                                                      int32_t ranks, int32_t rank) {
  if (route != DirectRoute::kOneHop) return SliceOfRank(heads, ranks, rank);
  return rank == 0 ? HeadSlice{0, heads} : HeadSlice{heads, 0};
}

// What benchmarks vary; 0 or less leaves the choice to the plan.
struct DirectTuning {
  int32_t movers = 0;
  int32_t blocks = 0;
  int32_t one_hop = -1;  // 0: never, 1: whenever it fits
  // Launches as a dependent of the kernel before it in the stream, which hides a part of the
  // launch.
  bool overlap_launch = true;
};

// Room for calls as large as `rows` x `heads` x `value_dim` elements of type `widest`.
DirectLayout LayOutDirect(int32_t ranks, int32_t rows, int32_t heads, int32_t value_dim,
                          DType widest);

// False when the call does not fit the layout.
bool PlanDirect(const DirectShape& shape, const DirectLayout& layout, const DirectTuning& tuning,
                DirectPlan* plan);

// Why a group broke, in one word: what, and the ranks it is about.
enum class DirectFailure : uint32_t { kNone, kLate, kAborted, kTold };
constexpr uint32_t DirectFailureWord(DirectFailure what, uint32_t ranks) {
  return static_cast<uint32_t>(what) << 16 | (ranks & 0xffffu);
}
constexpr DirectFailure WhatFailed(uint32_t word) { return static_cast<DirectFailure>(word >> 16); }
constexpr uint32_t RanksOf(uint32_t word) { return word & 0xffffu; }

}  // namespace tributary::collective
