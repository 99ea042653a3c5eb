// What is decided before a GPU is touched: how a direct exchange is cut, who can reach whom, which
// strategy is taken.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/device/device_exchange.h"
#include "collective/direct/direct_layout.h"
#include "collective/direct/peer_access.h"
#include "collective/direct/retired_memory.h"
#include "collective/group/device_choice.h"
#include "collective/rendezvous/hex.h"

namespace tributary::collective {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

DirectShape Shape(int32_t rows, Placement placement = Placement::kScattered) {
  return {.rows = rows, .heads = 32, .value_dim = 128, .placement = placement};
}

TEST(DirectPlan, CoversEveryUnitOnce) {
  for (const int32_t ranks : {2, 3, 4, 8}) {
    for (const int32_t rows : {1, 7, 128, 512}) {
      for (const Placement placement : {Placement::kScattered, Placement::kGathered}) {
        const DirectLayout layout = LayOutDirect(ranks, 512, 32, 128, DType::kF32);
        DirectPlan plan;
        ASSERT_TRUE(PlanDirect(Shape(rows, placement), layout, {}, &plan));
        int32_t heads = 0;
        int32_t dealt = 0;
        for (int32_t r = 0; r < ranks; ++r) {
          const HeadSlice slice = DirectSlice(plan.route, 32, ranks, r);
          heads = std::max(heads, slice.count);
          if (slice.count > 0) {
            EXPECT_EQ(slice.begin, dealt);
          }
          dealt += slice.count;
        }
        EXPECT_EQ(dealt, 32);
        EXPECT_GE(plan.blocks * plan.units, rows * heads);
        EXPECT_LT((plan.blocks - 1) * plan.units, rows * heads) << "a block without work";
        EXPECT_LE(plan.blocks, kDirectChannels);
      }
    }
  }
}

TEST(DirectPlan, WhatFitsItsLimitsFitsItsChannels) {
  for (const int32_t ranks : {2, 4, 8}) {
    for (const DType wire : {DType::kF32, DType::kBf16}) {
      const DirectLayout layout = LayOutDirect(ranks, 100, 32, 128, wire);
      DirectShape shape = Shape(100);
      shape.wire = shape.out = wire;
      for (const Placement placement : {Placement::kScattered, Placement::kGathered}) {
        shape.placement = placement;
        DirectPlan plan;
        EXPECT_TRUE(PlanDirect(shape, layout, {}, &plan));
        shape.rows = 1000;
        EXPECT_FALSE(PlanDirect(shape, layout, {}, &plan));
        shape.rows = 100;
      }
    }
  }
}

TEST(DirectPlan, NothingIsPlannedForNothing) {
  DirectPlan plan;
  ASSERT_TRUE(PlanDirect(Shape(0), LayOutDirect(4, 8, 32, 128, DType::kF32), {}, &plan));
  EXPECT_EQ(plan.blocks, 0);
}

TEST(DirectPlan, GatheredTakesOneHopWhileThatIsLittle) {
  const DirectLayout layout = LayOutDirect(4, 512, 32, 128, DType::kF32);
  DirectPlan plan;
  ASSERT_TRUE(PlanDirect(Shape(1, Placement::kGathered), layout, {}, &plan));
  EXPECT_EQ(plan.route, DirectRoute::kOneHop);
  ASSERT_TRUE(PlanDirect(Shape(512, Placement::kGathered), layout, {}, &plan));
  EXPECT_EQ(plan.route, DirectRoute::kTwoHops);
  ASSERT_TRUE(PlanDirect(Shape(1, Placement::kScattered), layout, {}, &plan));
  EXPECT_EQ(plan.route, DirectRoute::kScatter);
}

TEST(DirectLayout, PlacesDoNotOverlap) {
  const DirectLayout layout = LayOutDirect(4, 64, 8, 64, DType::kBf16);
  std::set<size_t> starts;
  size_t last = 0;
  for (const DirectStage stage : {DirectStage::kPartials, DirectStage::kMerged}) {
    for (uint32_t slot = 0; slot < kDirectSlots; ++slot) {
      for (int source = 0; source < 4; ++source) {
        for (int channel = 0; channel < kDirectChannels; ++channel) {
          const size_t at = layout.inbox(stage, slot, source, channel);
          EXPECT_EQ(at % 128, 0u);
          EXPECT_TRUE(starts.insert(at).second);
          last = std::max(last, at);
        }
      }
    }
  }
  EXPECT_GE(*starts.begin(), layout.control_bytes());
  EXPECT_EQ(last + layout.channel_bytes, layout.bytes(0));
  EXPECT_LT(layout.bytes(1), layout.bytes(0)) << "merged heads come to rank 0 alone";
  EXPECT_LT(layout.closed(kMaxDirectRanks - 1), layout.step(0));
}

TEST(DirectFailure, SurvivesItsWord) {
  const uint32_t word = DirectFailureWord(DirectFailure::kLate, 0b1010);
  EXPECT_EQ(WhatFailed(word), DirectFailure::kLate);
  EXPECT_EQ(RanksOf(word), 0b1010u);
  EXPECT_EQ(WhatFailed(0), DirectFailure::kNone);
}

std::vector<PeerIdentity> Peers(int n) {
  std::vector<PeerIdentity> peers;
  for (int r = 0; r < n; ++r) {
    peers.push_back({.host = "a", .gpu = "gpu" + std::to_string(r)});
  }
  return peers;
}

TEST(PeerAccess, NeedsOneHostAndReach) {
  const auto reaches = [](const std::string&) { return std::string(); };
  EXPECT_THAT(WhyNoDirectAccess(Peers(4), 1, 8, reaches), IsEmpty());
  EXPECT_THAT(WhyNoDirectAccess(Peers(9), 1, 8, reaches), HasSubstr("9 ranks"));
  std::vector<PeerIdentity> apart = Peers(4);
  apart[2].host = "b";
  EXPECT_THAT(WhyNoDirectAccess(apart, 1, 8, reaches), HasSubstr("rank 2 is on another host"));
  const auto blind = [](const std::string& gpu) {
    return gpu == "gpu3" ? std::string("out of reach") : std::string();
  };
  EXPECT_THAT(WhyNoDirectAccess(Peers(4), 1, 8, blind), HasSubstr("rank 3: out of reach"));
  // Its own GPU is not asked about.
  EXPECT_THAT(WhyNoDirectAccess(Peers(4), 3, 8, blind), IsEmpty());
}

DeviceExchangeParams Params(int32_t rows, Placement placement) {
  return {.rows = rows, .heads = 32, .value_dim = 128, .placement = placement};
}

TEST(ChooseDeviceStrategy, TakesWhatThereIs) {
  DeviceExchangeCapability c{.ranks = 4,
                             .limits = {.rows = 512, .heads = 32, .value_dim = 128},
                             .no_nccl = "",
                             .no_direct = ""};
  Strategy s = Strategy::kAuto;
  for (const int32_t rows : {1, 512}) {
    ASSERT_TRUE(ChooseDeviceStrategy(Params(rows, Placement::kScattered), c, &s).ok());
    EXPECT_EQ(s, Strategy::kDirect);
  }
  c.no_direct = "rank 2 is on another host";
  ASSERT_TRUE(ChooseDeviceStrategy(Params(1, Placement::kScattered), c, &s).ok());
  EXPECT_EQ(s, Strategy::kA2a);
  ASSERT_TRUE(ChooseDeviceStrategy(Params(1, Placement::kGathered), c, &s).ok());
  EXPECT_EQ(s, Strategy::kAllGather);
  ASSERT_TRUE(ChooseDeviceStrategy(Params(512, Placement::kGathered), c, &s).ok());
  EXPECT_EQ(s, Strategy::kA2a);
  c.no_nccl = "not installed";
  const Status none = ChooseDeviceStrategy(Params(1, Placement::kScattered), c, &s);
  EXPECT_EQ(none.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(none.message(), HasSubstr("rank 2 is on another host"));
  EXPECT_THAT(none.message(), HasSubstr("not installed"));
}

TEST(ChooseDeviceStrategy, RefusesWhatIsForcedAndMissing) {
  DeviceExchangeCapability c{.ranks = 4, .limits = {}, .no_nccl = "", .no_direct = "no link"};
  DeviceExchangeParams p = Params(1, Placement::kScattered);
  Strategy s = Strategy::kAuto;
  p.strategy = Strategy::kDirect;
  EXPECT_THAT(ChooseDeviceStrategy(p, c, &s).message(), HasSubstr("no link"));
  p.strategy = Strategy::kAgRs;
  ASSERT_TRUE(ChooseDeviceStrategy(p, c, &s).ok());
  EXPECT_EQ(s, Strategy::kAgRs);
  p.rows = 100000;
  EXPECT_THAT(ChooseDeviceStrategy(p, c, &s).message(), HasSubstr("100000 rows"));
}

// One launch merges the partials of sixteen ranks, and no more.
TEST(ChooseDeviceStrategy, OfManyRanksOnlySumsAreTaken) {
  DeviceExchangeCapability c{.ranks = 17, .limits = {}, .no_nccl = "", .no_direct = "too many"};
  DeviceExchangeParams p = Params(1, Placement::kScattered);
  Strategy s = Strategy::kAuto;
  ASSERT_TRUE(ChooseDeviceStrategy(p, c, &s).ok());
  EXPECT_EQ(s, Strategy::kAgRs);
  for (const Strategy forced : {Strategy::kAllGather, Strategy::kA2a}) {
    p.strategy = forced;
    EXPECT_THAT(ChooseDeviceStrategy(p, c, &s).message(), HasSubstr("at most 16 ranks"));
    c.ranks = 16;
    EXPECT_TRUE(ChooseDeviceStrategy(p, c, &s).ok());
    c.ranks = 17;
  }
}

// ---- calls that are larger than their group -----------------------------------------------------

TEST(RowsAtOnce, TakesWhatFitsAndHalvesTheRest) {
  for (const int32_t ranks : {1, 2, 4, 8}) {
    DeviceExchangeCapability c{.ranks = ranks,
                               .limits = {.rows = 64, .heads = 32, .value_dim = 128}};
    DeviceExchangeParams p{.rows = 64, .heads = 32, .value_dim = 128, .wire = DType::kF32};
    p.out_dtype = DType::kF32;
    for (const Placement placement : {Placement::kGathered, Placement::kScattered}) {
      p.placement = placement;
      p.rows = 64;
      EXPECT_EQ(RowsAtOnce(p, c), 64);
      p.rows = 65;
      EXPECT_EQ(RowsAtOnce(p, c), 33);
      p.rows = 1000;
      EXPECT_EQ(RowsAtOnce(p, c), 63);
      p.rows = 0;
      EXPECT_EQ(RowsAtOnce(p, c), 0);
    }
  }
}

TEST(RowsAtOnce, KnowsEveryWayThatTheGroupLacks) {
  DeviceExchangeCapability c{.ranks = 4, .limits = {.rows = 64, .heads = 32, .value_dim = 128}};
  DeviceExchangeParams p{.rows = 100, .heads = 32, .value_dim = 128, .wire = DType::kF32};
  p.out_dtype = DType::kF32;
  DeviceGatherParams g{.dtype = DType::kF32, .rows = 100, .heads = 32, .value_dim = 128};
  c.no_direct = "no peer access";
  EXPECT_GT(RowsAtOnce(p, c), 0);
  EXPECT_GT(RowsAtOnce(g, c), 0);
  p.strategy = Strategy::kDirect;
  EXPECT_EQ(RowsAtOnce(p, c), 0);
  c.no_nccl = "not installed";
  p.strategy = Strategy::kAuto;
  EXPECT_EQ(RowsAtOnce(p, c), 0);
  EXPECT_EQ(RowsAtOnce(g, c), 0);
  c.no_direct = "";
  EXPECT_GT(RowsAtOnce(p, c), 0);
  EXPECT_GT(RowsAtOnce(g, c), 0);
}

// Heads that are dealt unevenly take more room than their number says: fewer rows then, not none.
TEST(RowsAtOnce, UnevenHeadsStillFit) {
  for (const int32_t ranks : {2, 3, 4, 8}) {
    DeviceExchangeCapability direct{
        .ranks = ranks, .limits = {.rows = 512, .heads = 32, .value_dim = 128}, .no_nccl = "no"};
    DeviceExchangeCapability nccl = direct;
    std::swap(nccl.no_nccl, nccl.no_direct);
    for (const int32_t heads : {1, 3, 5, 9, 33, 128}) {
      DeviceExchangeParams p{.rows = 4096, .heads = heads, .value_dim = 256, .wire = DType::kF32};
      p.out_dtype = DType::kF32;
      DeviceGatherParams g{.dtype = DType::kF32, .rows = 4096, .heads = heads, .value_dim = 256};
      for (const DeviceExchangeCapability& c : {direct, nccl}) {
        for (const Placement placement : {Placement::kGathered, Placement::kScattered}) {
          p.placement = placement;
          EXPECT_GT(RowsAtOnce(p, c), 0) << ranks << " ranks, " << heads << " heads";
        }
        EXPECT_GT(RowsAtOnce(g, c), 0) << ranks << " ranks, " << heads << " heads";
      }
    }
  }
}

TEST(CheckDeviceExchange, NamesTheField) {
  alignas(16) static float memory[8];
  DeviceExchangeParams p = Params(1, Placement::kGathered);
  p.o = memory;
  p.lse = memory;
  p.out = memory;
  EXPECT_TRUE(CheckDeviceExchange(p, 0, 4).ok());
  const auto message = [&](auto change) {
    DeviceExchangeParams changed = p;
    change(changed);
    const Status s = CheckDeviceExchange(changed, 0, 4);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  };
  EXPECT_THAT(message([](auto& q) { q.o = nullptr; }), HasSubstr("o is null"));
  EXPECT_THAT(message([](auto& q) { q.o = memory + 1; }), HasSubstr("aligned"));
  EXPECT_THAT(message([](auto& q) { q.lse = nullptr; }), HasSubstr("lse"));
  EXPECT_THAT(message([](auto& q) { q.out = nullptr; }), HasSubstr("out"));
  EXPECT_THAT(message([](auto& q) { q.rows = -1; }), HasSubstr("rows"));
  EXPECT_THAT(message([](auto& q) { q.value_dim = 12; }), HasSubstr("value_dim"));
  EXPECT_THAT(message([](auto& q) { q.wire = DType::kFp8E4M3; }), HasSubstr("wire"));
  EXPECT_THAT(message([](auto& q) { q.o_dtype = DType::kF16; }), HasSubstr("o_dtype"));
  EXPECT_THAT(message([](auto& q) {
                q.partial_arrives = true;
                q.o_dtype = DType::kBf16;
              }),
              HasSubstr("partial_arrives"));
  // Where nothing is written nothing is wanted.
  p.out = nullptr;
  EXPECT_TRUE(CheckDeviceExchange(p, 1, 4).ok());
}

TEST(DeviceBytesSent, GrowsAsTheStrategySays) {
  const DeviceExchangeParams p = Params(64, Placement::kScattered);
  const size_t whole = 64 * 32 * (128 * 2 + 4);
  EXPECT_EQ(DeviceBytesSent(p, 4, Strategy::kAllGather), 3 * whole);
  EXPECT_EQ(DeviceBytesSent(p, 4, Strategy::kA2a), 3 * whole / 4);
  EXPECT_LT(DeviceBytesSent(p, 4, Strategy::kDirect), 3 * whole / 4 + 4096);
  EXPECT_GT(DeviceBytesSent(p, 4, Strategy::kAgRs), DeviceBytesSent(p, 4, Strategy::kA2a));
  EXPECT_EQ(DeviceBytesSent(p, 1, Strategy::kDirect), 0u);
}

TEST(RetiredMemory, KeepsWhatCannotBeFreed) {
  RetiredMemory retired;
  bool free_now = false;
  retired.Add(100, [] { return true; });
  retired.Add(30, [&] { return free_now; });
  EXPECT_EQ(retired.Sweep(), 30u);
  free_now = true;
  EXPECT_EQ(retired.Sweep(), 0u);
}

TEST(Hex, IsReadBack) {
  const uint8_t bytes[] = {0, 1, 0xab, 0xff};
  uint8_t back[4] = {};
  EXPECT_EQ(ToHex(bytes, 4), "0001abff");
  EXPECT_TRUE(FromHex("0001abff", back, 4));
  EXPECT_THAT(back, testing::ElementsAreArray(bytes));
  EXPECT_FALSE(FromHex("0001abf", back, 4));
  EXPECT_FALSE(FromHex("0001abfg", back, 4));
}

}  // namespace
}  // namespace tributary::collective
