// What is shared among sequences, as it is planned, and whether it is worth it. No GPU is needed.
#include "kernels/cuda/plan/shared_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/cuda/decode/choose_kernel.h"
#include "kernels/cuda/decode/side_by_side.h"

namespace tributary::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kUnit = kSharedSlots;

// FP8, 32/8 heads of 128, on an H200.
constexpr SharingCosts kCosts{.gqa_ratio = 4,
                              .widest_tile = 64,
                              .kv_heads = 8,
                              .bytes_per_token = 256,
                              .multiprocessors = 132};
// With these, whatever saves a read is worth it.
constexpr SharingCosts kEager{.gqa_ratio = 4,
                              .widest_tile = 64,
                              .kv_heads = 8,
                              .bytes_per_token = 1 << 20,
                              .multiprocessors = 0};

// Entries of causal rows at the ends of sequences.
struct Entries {
  explicit Entries(std::vector<std::pair<int64_t, int32_t>> lengths_and_rows) {
    for (const auto& [length, rows] : lengths_and_rows) {
      pages.emplace_back(static_cast<size_t>((length + 15) / 16));
      const auto begin = static_cast<int32_t>(keys.size());
      entries.push_back({begin, rows, {}});
      tables.push_back(1000 * static_cast<int32_t>(tables.size()));
      for (int32_t row = 0; row < rows; ++row) keys.push_back({0, length - rows + row + 1});
    }
    for (size_t i = 0; i < entries.size(); ++i) entries[i].pages = pages[i];
  }
  SharedPlan Plan(const SharingCosts& costs, const std::vector<SharedPages>& shared) const {
    SharedPlan plan;
    PlanShared(costs, entries, tables, keys, shared, &plan);
    return plan;
  }

  std::vector<std::vector<int32_t>> pages;
  std::vector<AttentionEntry> entries;
  std::vector<int32_t> tables;
  std::vector<KeyRange> keys;
};

std::vector<int32_t> Numbers(int32_t count) {
  std::vector<int32_t> all;
  for (int32_t i = 0; i < count; ++i) all.push_back(i);
  return all;
}

TEST(SharedPlanTest, GathersRowsRunByRun) {
  const Entries e({{2 * kUnit + 8, 1}, {50, 1}, {3 * kUnit, 2}, {kUnit + 1, 1}});
  const SharedPlan plan = e.Plan(kEager, {{{0, kUnit}, {0, 2, 3}}, {{kUnit, 2 * kUnit}, {0, 2}}});
  ASSERT_EQ(plan.entries.size(), 2u);
  EXPECT_EQ(plan.entries[0].row_begin, 0);
  EXPECT_EQ(plan.entries[0].row_count, 4);
  EXPECT_EQ(plan.entries[0].page_table, 2000) << "the longest";
  EXPECT_EQ(plan.entries[1].row_begin, 4);
  EXPECT_EQ(plan.entries[1].row_count, 3);
  EXPECT_THAT(plan.rows, ElementsAre(0, 2, 3, 4, 0, 2, 3));
  EXPECT_FALSE(plan.InOrder());
  EXPECT_EQ(plan.most_rows, 4);
  EXPECT_EQ(plan.total_keys, 2 * kUnit);
  for (size_t i = 0; i < plan.keys.size(); ++i) {
    EXPECT_EQ(plan.keys[i].lo, i < 4 ? 0 : kUnit);
    EXPECT_EQ(plan.keys[i].hi, i < 4 ? kUnit : 2 * kUnit);
  }
  // What is left, and where each row's parts are.
  EXPECT_EQ(plan.rest[0].lo, 2 * kUnit);
  EXPECT_EQ(plan.rest[0].hi, 2 * kUnit + 8);
  EXPECT_EQ(plan.rest[1].lo, 0);
  EXPECT_EQ(plan.rest[1].hi, 50);
  EXPECT_EQ(plan.rest[4].lo, kUnit);
  std::vector<std::vector<int32_t>> parts;
  for (const RowParts& row : plan.parts) {
    const auto begin = plan.part_rows.begin() + row.begin;
    parts.emplace_back(begin, begin + row.count);
  }
  EXPECT_THAT(parts, ElementsAre(ElementsAre(0, 4), IsEmpty(), ElementsAre(1, 5), ElementsAre(2, 6),
                                 ElementsAre(3)));
}

TEST(SharedPlanTest, ForksSideBySideNeedNoGathering) {
  const Entries e({{90, 1}, {kUnit + 5, 2}, {kUnit + 9, 1}});
  const SharedPlan plan = e.Plan(kEager, {{{0, kUnit}, {1, 2}}});
  EXPECT_THAT(plan.rows, ElementsAre(1, 2, 3));
  EXPECT_TRUE(plan.InOrder());
}

TEST(SharedPlanTest, RowsSeeTheirOwnPartOfARun) {
  Entries e({{kUnit + 100, 1}, {kUnit + 100, 3}});
  e.keys = {{0, kUnit + 100}, {1020, 1030}, {1024, 1100}, {0, 0}};
  const SharedPlan plan = e.Plan(kEager, {{{0, kUnit}, {0, 1}}});
  EXPECT_THAT(plan.rows, ElementsAre(0, 1));
  EXPECT_EQ(plan.keys[1].lo, 1020);
  EXPECT_EQ(plan.keys[1].hi, kUnit);
  EXPECT_EQ(plan.rest[1].lo, kUnit);
  EXPECT_EQ(plan.rest[1].hi, 1030);
  EXPECT_EQ(plan.rest[2].lo, 1024);
  EXPECT_TRUE(Empty(plan.rest[3]));
  EXPECT_EQ(plan.parts[2].count, 0);
}

TEST(SharedPlanTest, NothingIsTakenBehindWhatIsLeft) {
  // Two blocks of 64 packed rows each fill tiles of their own, and are short.
  const Entries e({{3 * kUnit, 16}, {3 * kUnit, 16}, {3 * kUnit, 1}});
  SharingCosts costs = kEager;
  costs.bytes_per_token = 256;
  const SharedPlan plan = e.Plan(costs, {{{0, kUnit}, {0, 1}}, {{kUnit, 2 * kUnit}, {0, 1}}});
  EXPECT_TRUE(plan.empty());
  EXPECT_THAT(plan.rest, IsEmpty());
}

TEST(SharingRuleTest, AReadIsForATileOfRows) {
  EXPECT_EQ(ReadsOf(0, kCosts), 0);
  EXPECT_EQ(ReadsOf(1, kCosts), 1);
  EXPECT_EQ(ReadsOf(16, kCosts), 1);
  EXPECT_EQ(ReadsOf(17, kCosts), 2);
  // Taking entries together never costs more than apart.
  for (int64_t a = 1; a < 70; ++a) {
    for (int64_t b = 1; b < 70; ++b) {
      EXPECT_LE(ReadsOf(a + b, kCosts), ReadsOf(a, kCosts) + ReadsOf(b, kCosts));
    }
  }
}

TEST(SharingRuleTest, ACallIsWorthItFromAFewMegabytesOn) {
  const auto shares = [&](int32_t forks, int64_t units, const SharingCosts& costs = kCosts) {
    const Entries e(std::vector<std::pair<int64_t, int32_t>>(forks, {units * kUnit + 500, 1}));
    return !e.Plan(costs, {{{0, units * kUnit}, Numbers(forks)}}).empty();
  };
  EXPECT_TRUE(shares(32, 32));
  EXPECT_TRUE(shares(64, 8));
  EXPECT_TRUE(shares(2, 64));
  EXPECT_FALSE(shares(2, 16)) << "34 MB are read in 4 us from L2";
  EXPECT_FALSE(shares(8, 1));
  // A smaller GPU needs longer for as much.
  SharingCosts small = kCosts;
  small.multiprocessors = 40;
  EXPECT_TRUE(shares(2, 16, small));
}

TEST(SharedPlanTest, CountsReads) {
  // 32 forks of 128 packed rows: two tiles read the run, one tile what each fork has of its own.
  const Entries e(std::vector<std::pair<int64_t, int32_t>>(32, {4 * kUnit + 500, 1}));
  const SharedPlan plan = e.Plan(kEager, {{{0, 4 * kUnit}, Numbers(32)}});
  EXPECT_EQ(plan.shared_reads, 2 * 4 * kUnit);
  EXPECT_EQ(plan.rest_reads, 32 * 500);
}

TEST(SideBySideTest, LaunchesGetMultiprocessorsByWhatTheyRead) {
  const DeviceProperties h200{.compute_capability = 90, .multiprocessors = 132};
  // Of forks that share so many slots and have so many of their own.
  const auto deal = [&](int32_t forks, int64_t units, int64_t own) {
    const Entries e(std::vector<std::pair<int64_t, int32_t>>(static_cast<size_t>(forks),
                                                             {units * kUnit + own, 1}));
    return DealMultiprocessors(h200, kCosts,
                               e.Plan(kEager, {{{0, units * kUnit}, Numbers(forks)}}));
  };
  // 16 and 32 jobs: two and four query tiles in eight KV heads.
  EXPECT_EQ(deal(32, 32, 1024).shared, 96);
  EXPECT_EQ(deal(64, 8, 512).shared, 64);
  for (const int32_t forks : {2, 16, 32, 64, 100}) {
    for (const int64_t own : {100, 1000, 10000}) {
      const SideBySide dealt = deal(forks, 32, own);
      if (dealt.one_after_the_other()) continue;
      EXPECT_EQ(dealt.shared + dealt.rest, 132);
      EXPECT_EQ(dealt.shared % 2, 0) << "for clusters of two";
      EXPECT_GE(dealt.shared, 8);
      EXPECT_GE(dealt.rest, 8);
    }
  }
  EXPECT_TRUE(deal(2, 1, 100000).one_after_the_other()) << "what is shared is next to nothing";
}

TEST(SideBySideTest, SeveralRunsAreReadAheadOfTheRest) {
  const Entries e(std::vector<std::pair<int64_t, int32_t>>(8, {40 * kUnit, 1}));
  const SharedPlan plan =
      e.Plan(kEager, {{{0, 10 * kUnit}, {0, 1, 2, 3}}, {{0, 10 * kUnit}, {4, 5, 6, 7}}});
  EXPECT_TRUE(DealMultiprocessors({90, 132}, kCosts, plan).one_after_the_other());
}

TEST(SideBySideTest, APartOfADeviceHasItsShareOfClusters) {
  const DeviceProperties part = PartOf({90, 132, {66, 32, 16}}, 66);
  EXPECT_EQ(part.multiprocessors, 66);
  EXPECT_EQ(part.clusters[0], 33);
  EXPECT_EQ(part.clusters[2], 8);
}

TEST(SideBySideTest, OnlyKernelsThatWaitAtTheirEnd) {
  KernelChoice shared{.kind = KernelKind::kWgmmaFp8, .begins_early = true};
  KernelChoice rest{.kind = KernelKind::kMma, .begins_early = true};
  EXPECT_TRUE(MayRunSideBySide(shared, rest));
  EXPECT_FALSE(MayRunSideBySide(rest, shared));
  shared.tile_rows = 64;
  EXPECT_TRUE(GainSideBySide(shared, rest));
  EXPECT_FALSE(GainSideBySide(rest, rest)) << "both read";
  shared.begins_early = false;
  EXPECT_FALSE(MayRunSideBySide(shared, rest)) << "the launch behind would wait for it";
}

TEST(SideBySideTest, KernelsAreChosenForTheirPartWhereTheyGain) {
  const DeviceProperties h200{90, 132, {66, 30, 15}};
  AttentionShape call{.geometry = SquareGeometry(8, 128, DType::kFp8E4M3),
                      .q_heads = 32,
                      .page_size = 16,
                      .max_rows = 1,
                      .sequences = 64,
                      .total_keys = 64 * 512};
  SharedPlan plan;
  plan.entries.resize(1);
  plan.most_rows = 64;
  plan.total_keys = 8192;
  const AttentionShape shared = ShapeOfShared(call, plan);
  EXPECT_EQ(shared.max_rows, 64);
  EXPECT_EQ(shared.sequences, 1);
  EXPECT_EQ(shared.total_keys, 8192);
  const SharedChoice beside = ChooseShared(h200, shared, call, {}, {.shared = 64, .rest = 68});
  EXPECT_TRUE(beside.side_by_side);
  EXPECT_EQ(beside.shared.kind, KernelKind::kWgmmaFp8);
  EXPECT_EQ(beside.rest.kind, KernelKind::kMma);
  EXPECT_EQ(beside.shared_device.multiprocessors, 64);
  EXPECT_EQ(beside.rest_device.multiprocessors, 68);
  const SharedChoice in_turn = ChooseShared(h200, shared, call, {}, {});
  EXPECT_FALSE(in_turn.side_by_side);
  EXPECT_EQ(in_turn.shared_device.multiprocessors, 132);
  call.max_rows = 8;  // 32 packed rows: the rest multiplies, too
  const SharedChoice wide = ChooseShared(h200, shared, call, {}, {.shared = 64, .rest = 68});
  EXPECT_FALSE(wide.side_by_side);
  EXPECT_EQ(wide.rest_device.multiprocessors, 132);
}

TEST(SharingRuleTest, DependsOnTheDevicesKernels) {
  AttentionShape shape{
      .geometry = SquareGeometry(8, 128, DType::kFp8E4M3), .q_heads = 32, .page_size = 16};
  const SharingCosts h200 = SharingCostsFor({90, 132}, shape);
  EXPECT_EQ(h200.widest_tile, 64);
  EXPECT_EQ(h200.gqa_ratio, 4);
  EXPECT_EQ(h200.bytes_per_token, 256);
  EXPECT_EQ(SharingCostsFor({80, 108}, shape).widest_tile, 16);
  EXPECT_EQ(SharingCostsFor({90, 132}, shape, {.portable = true}).widest_tile, 16);
  shape.geometry = SquareGeometry(8, 256, DType::kBf16);
  EXPECT_EQ(SharingCostsFor({90, 132}, shape).widest_tile, 32);
}

}  // namespace
}  // namespace tributary::cuda
