#include "collective/direct/direct_layout.h"

#include <algorithm>

namespace tributary::collective {
namespace {

constexpr size_t CeilDiv(size_t a, size_t b) { return (a + b - 1) / b; }

// O and LSE of one row and head.
size_t UnitBytes(int32_t value_dim, DType type) {
  return static_cast<size_t>(value_dim) * SizeOf(type) + sizeof(float);
}

// Measured on 4 H200s: small calls want small blocks; large ones want fewer threads than would send
// a packet each, and of those that take two hops fewer still.
constexpr int32_t kFewMovers = 128;
constexpr int32_t kManyMovers = 256;
constexpr size_t kManyPackets = size_t{128} * kFewMovers;

// With one hop rank 0 takes in (ranks - 1) whole partials; with two, as many slices, once as
// partials and once merged, after a second flight over the link. On 4 H200s 400 KB less did not pay
// for the second hop (by 1.5 us), 1.6 MB less did (by 2.6 us).
constexpr size_t kFlightBytes = 800 << 10;

bool OneHopIsFaster(const DirectShape& s, int32_t ranks) {
  if (ranks == 2) return true;
  const size_t pairs = static_cast<size_t>(s.rows) * s.heads;
  const size_t slice_pairs = static_cast<size_t>(s.rows) * SliceOfRank(s.heads, ranks, 0).count;
  const size_t one = (ranks - 1) * pairs * UnitBytes(s.value_dim, s.wire);
  const size_t two =
      (ranks - 1) * slice_pairs * (UnitBytes(s.value_dim, s.wire) + UnitBytes(s.value_dim, s.out));
  return one <= two + kFlightBytes;
}

DirectRoute RouteOf(const DirectShape& s, int32_t ranks, const DirectTuning& tuning) {
  if (s.merged) return DirectRoute::kGather;
  if (s.placement == Placement::kScattered) return DirectRoute::kScatter;
  const bool one = tuning.one_hop >= 0 ? tuning.one_hop == 1 : OneHopIsFaster(s, ranks);
  return one ? DirectRoute::kOneHop : DirectRoute::kTwoHops;
}

bool CutFor(DirectRoute route, const DirectShape& s, const DirectLayout& layout,
            const DirectTuning& tuning, DirectPlan* plan) {
  const int32_t heads = DirectSlice(route, s.heads, layout.ranks, 0).count;
  const size_t units = static_cast<size_t>(s.rows) * heads;
  const size_t packets_of_unit = static_cast<size_t>(s.value_dim) *
                                 SizeOf(route == DirectRoute::kGather ? s.out : s.wire) /
                                 kDirectPacket;
  const size_t packets = units * packets_of_unit;
  const bool many = packets > kManyPackets && route != DirectRoute::kTwoHops;
  plan->route = route;
  plan->movers = tuning.movers > 0 ? tuning.movers : many ? kManyMovers : kFewMovers;
  const size_t wanted = tuning.blocks > 0 ? tuning.blocks : CeilDiv(packets, plan->movers);
  size_t unit_bytes = UnitBytes(s.value_dim, s.out);
  if (route == DirectRoute::kScatter || route == DirectRoute::kOneHop) {
    unit_bytes = UnitBytes(s.value_dim, s.wire);
  } else if (route == DirectRoute::kTwoHops) {
    unit_bytes = std::max(unit_bytes, UnitBytes(s.value_dim, s.wire));
  }
  const size_t fitting = layout.channel_bytes / unit_bytes;
  if (fitting == 0 || CeilDiv(units, fitting) > kDirectChannels) return false;
  const size_t most = std::min<size_t>({wanted, kDirectChannels, units});
  const size_t each =
      std::max<size_t>(1, std::min(fitting, CeilDiv(units, std::max<size_t>(1, most))));
  plan->units = static_cast<int32_t>(each);
  plan->blocks = static_cast<int32_t>(CeilDiv(units, each));
  return true;
}

}  // namespace

DirectShape DirectShapeOf(const DeviceExchangeParams& p) {
  return {.rows = p.rows,
          .heads = p.heads,
          .value_dim = p.value_dim,
          .placement = p.placement,
          .wire = p.wire,
          .out = p.out_dtype};
}

DirectShape DirectShapeOf(const DeviceGatherParams& p) {
  return {
      .rows = p.rows, .heads = p.heads, .value_dim = p.value_dim, .merged = true, .out = p.dtype};
}

DirectLayout LayOutDirect(int32_t ranks, int32_t rows, int32_t heads, int32_t value_dim,
                          DType widest) {
  // Between two ranks one hop is always taken, so all heads have to fit.
  const int32_t slice = ranks == 2 ? heads : SliceOfRank(heads, ranks, 0).count;
  const size_t units = static_cast<size_t>(rows) * slice;
  const size_t of_channel = CeilDiv(units, kDirectChannels) * UnitBytes(value_dim, widest);
  return {.ranks = ranks, .channel_bytes = CeilDiv(std::max<size_t>(of_channel, 1), 128) * 128};
}

bool PlanDirect(const DirectShape& shape, const DirectLayout& layout, const DirectTuning& tuning,
                DirectPlan* plan) {
  const DirectRoute route = RouteOf(shape, layout.ranks, tuning);
  if (CutFor(route, shape, layout, tuning, plan)) return true;
  // A slice may fit where all heads do not.
  return route == DirectRoute::kOneHop &&
         CutFor(DirectRoute::kTwoHops, shape, layout, tuning, plan);
}

}  // namespace tributary::collective
