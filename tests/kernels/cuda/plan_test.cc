// The plan is host arithmetic: these tests run without a GPU.
#include "kernels/cuda/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <tuple>

#include "kernels/cuda/architectures.h"
#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/decode/sm90/wgmma_fp8_attention.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/head_dims.h"

namespace tributary::cuda {
namespace {

struct Batch {
  std::vector<PlanEntry> entries;
  std::vector<KeyRange> keys;
};

Batch CausalBatch(const std::vector<int64_t>& lengths, int32_t rows) {
  Batch batch;
  for (int64_t length : lengths) {
    batch.entries.push_back({static_cast<int32_t>(batch.keys.size()), rows,
                             static_cast<int32_t>(100 * batch.entries.size())});
    for (int32_t row = 0; row < rows; ++row) {
      batch.keys.push_back({0, std::max<int64_t>(0, length - rows + row + 1)});
    }
  }
  return batch;
}

// Follows every block through its items and checks that each column of each sequence and kv head is
// covered, key by key, exactly once.
void ExpectCoversEverything(const DecodePlanShape& shape, const Batch& batch, const Plan& plan) {
  using Job = std::tuple<int32_t, int32_t, int32_t>;  // row_begin, packed_begin, kv_head
  std::map<Job, std::vector<const WorkItem*>> pieces;
  ASSERT_GE(plan.items.size(), static_cast<size_t>(shape.blocks));
  for (int32_t block = 0; block < shape.blocks; ++block) {
    if (plan.items[block].packed_count == 0) continue;
    for (int32_t i = block; i >= 0; i = plan.items[i].next) {
      const WorkItem& item = plan.items[i];
      pieces[{item.row_begin, item.packed_begin, item.kv_head}].push_back(&item);
    }
  }
  size_t jobs = 0;
  for (const PlanEntry& entry : batch.entries) {
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      for (int32_t c = 0; c < entry.row_count * shape.gqa_ratio; c += shape.tile_rows) {
        ++jobs;
        auto& job = pieces[{entry.row_begin, c, head}];
        ASSERT_FALSE(job.empty());
        std::sort(job.begin(), job.end(), [](const WorkItem* a, const WorkItem* b) {
          return a->split_index < b->split_index;
        });
        int32_t group = job.front()->key_begin / kStripSlots;
        for (size_t i = 0; i < job.size(); ++i) {
          const WorkItem& item = *job[i];
          EXPECT_EQ(item.split_count, static_cast<int32_t>(job.size()));
          EXPECT_EQ(item.split_index, static_cast<int32_t>(i));
          EXPECT_EQ(item.page_table, entry.page_table);
          EXPECT_EQ(item.strip_begin, group);
          group = item.strip_end;
        }
        int64_t last_key = 0;
        for (int32_t column = c;
             column < std::min(c + shape.tile_rows, entry.row_count * shape.gqa_ratio); ++column) {
          last_key = std::max(last_key, batch.keys[entry.row_begin + column / shape.gqa_ratio].hi);
        }
        EXPECT_EQ(group, (last_key + kStripSlots - 1) / kStripSlots);
      }
    }
  }
  EXPECT_EQ(pieces.size(), jobs);
}

void ExpectWithinBounds(const DecodePlanShape& shape, const Batch& batch, int64_t keys,
                        const Plan& plan) {
  const PlanBounds bounds = BoundPlan(shape, static_cast<int64_t>(batch.entries.size()),
                                      static_cast<int64_t>(batch.keys.size()), keys);
  EXPECT_LE(static_cast<int64_t>(plan.items.size()), bounds.items);
  EXPECT_LE(plan.partials, bounds.partials);
  EXPECT_LE(plan.arrivals, bounds.arrivals);
}

TEST(PlanTest, EveryKeyOfEveryRowOnce) {
  std::mt19937 random(1);
  for (bool batch_invariant : {false, true}) {
    for (int32_t split_cost : {0, 1, 10, 40}) {
      for (int32_t rows : {1, 5, 40}) {
        for (int32_t blocks : {1, 7, 132, 264}) {
          std::vector<int64_t> lengths = {0, 1, 17, 20000};
          for (int i = 0; i < 20; ++i) lengths.push_back(random() % 3000);
          DecodePlanShape shape;
          shape.gqa_ratio = 3;
          shape.kv_heads = 2;
          shape.tile_rows = 16;
          shape.blocks = blocks;
          shape.split_cost = split_cost;
          shape.batch_invariant = batch_invariant;
          const Batch batch = CausalBatch(lengths, rows);
          Plan plan;
          PlanAttention(shape, batch.entries, batch.keys, &plan);
          ExpectCoversEverything(shape, batch, plan);
          ExpectWithinBounds(shape, batch, 20000 + 20 * 3000 + 18, plan);
        }
      }
    }
  }
}

TEST(PlanTest, AnyNumberOfJobsOfOneSize) {
  for (bool lone_splits : {false, true}) {
    for (int32_t sequences = 1; sequences <= 70; ++sequences) {
      for (int64_t length : {1, 300, 5000, 20000}) {
        DecodePlanShape shape;
        shape.kv_heads = 4;
        shape.blocks = 132;
        shape.split_cost = 8;
        shape.lone_splits = lone_splits;
        const Batch batch = CausalBatch(std::vector<int64_t>(sequences, length), 1);
        Plan plan;
        PlanAttention(shape, batch.entries, batch.keys, &plan);
        ASSERT_NO_FATAL_FAILURE(ExpectCoversEverything(shape, batch, plan));
        ExpectWithinBounds(shape, batch, sequences * length, plan);
      }
    }
  }
}

// Blocks of short sequences have ten pieces, others one: equal shares of the keys would let the
// former end last.
TEST(PlanTest, PiecesCostMoreThanTheirKeys) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.share_strips = 8;
  shape.blocks = 264;
  shape.split_cost = 10;
  std::mt19937 random(5);
  std::lognormal_distribution<double> lognormal(8.0, 1.0);
  std::vector<int64_t> lengths;
  for (int i = 0; i < 128; ++i) lengths.push_back(1 + static_cast<int64_t>(lognormal(random)));
  const Batch batch = CausalBatch(lengths, 1);
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  std::vector<int64_t> costs;
  size_t most_pieces = 0;
  for (int32_t block = 0; block < shape.blocks; ++block) {
    size_t pieces = 0;
    int64_t shares = 0;
    for (int32_t i = block; i >= 0; i = plan.items[i].next, ++pieces) {
      const int32_t groups = plan.items[i].strip_end - plan.items[i].strip_begin;
      shares += (groups + shape.share_strips - 1) / shape.share_strips;
    }
    costs.push_back(static_cast<int64_t>(pieces) * shape.split_cost + 4 * shares);
    most_pieces = std::max(most_pieces, pieces);
  }
  EXPECT_GE(most_pieces, 6u);
  // Of about 350; a piece that does not fit is left to the next block.
  costs.pop_back();
  const auto [least, most] = std::minmax_element(costs.begin(), costs.end());
  EXPECT_LE(*most - *least, 2 * (shape.split_cost + 4));
}

TEST(PlanTest, OneLongRowIsDealtOutLikeManyShortOnes) {
  DecodePlanShape shape;
  shape.kv_heads = 8;
  shape.blocks = 132;
  std::vector<int64_t> lengths(31, 4096);
  lengths.push_back(131072);
  const Batch batch = CausalBatch(lengths, 1);
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  int32_t least = INT32_MAX;
  int32_t most = 0;
  for (int32_t block = 0; block < shape.blocks; ++block) {
    int32_t groups = 0;
    for (int32_t i = block; i >= 0; i = plan.items[i].next) {
      groups += plan.items[i].strip_end - plan.items[i].strip_begin;
    }
    least = std::min(least, groups);
    most = std::max(most, groups);
  }
  EXPECT_LE(most - least, shape.share_strips);
}

TEST(PlanTest, JobsThatNearlyFillTheBlocksAreNotCut) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.blocks = 132;
  const Batch batch = CausalBatch(std::vector<int64_t>(32, 4096), 1);  // 128 jobs
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  EXPECT_EQ(plan.arrivals, 0);
}

TEST(PlanTest, JobsOfOneSizeAreCutAlike) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.blocks = 132;
  const Batch batch = CausalBatch(std::vector<int64_t>(8, 16384), 1);  // 32 jobs, 128 blocks
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  EXPECT_EQ(plan.blocks, 128);
  EXPECT_EQ(plan.partials, 128);
  EXPECT_EQ(plan.arrivals, 32);
  for (const WorkItem& item : plan.items) EXPECT_EQ(item.next, -1);
}

// 52 jobs of 32 shares: two pieces each would leave 28 blocks idle.
TEST(PlanTest, JobsOfOneSizeAreCutElsewhereWhereThatIsCheap) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.blocks = 132;
  shape.split_cost = 8;
  const Batch batch = CausalBatch(std::vector<int64_t>(13, 8192), 1);
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  EXPECT_EQ(plan.blocks, 104);
  shape.lone_splits = false;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  EXPECT_EQ(plan.blocks, 132);
  shape.split_cost = 20;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  EXPECT_EQ(plan.blocks, 104);
}

TEST(PlanTest, AClusterCountsItsArrivalsByBlock) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.blocks = 15;
  shape.cluster_size = 8;
  shape.share_strips = 128;
  const Batch batch = CausalBatch({65536}, 1);
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  EXPECT_EQ(plan.arrivals, 4 * 8);
  std::vector<int32_t> first;
  for (const WorkItem& item : plan.items) {
    if (item.split_count > 1 && item.split_index == 0) first.push_back(item.arrivals);
  }
  std::sort(first.begin(), first.end());
  EXPECT_EQ(first, (std::vector<int32_t>{0, 8, 16, 24}));
}

TEST(PlanTest, AShortJobIsNotCut) {
  DecodePlanShape shape;
  shape.kv_heads = 4;
  shape.blocks = 132;
  const Batch batch = CausalBatch({512}, 1);  // two shares
  Plan plan;
  PlanAttention(shape, batch.entries, batch.keys, &plan);
  ExpectCoversEverything(shape, batch, plan);
  EXPECT_EQ(plan.arrivals, 0);
}

TEST(PlanTest, InvariantPiecesDoNotDependOnTheBatch) {
  DecodePlanShape shape;
  shape.batch_invariant = true;
  shape.blocks = 132;
  const auto cuts = [&](const std::vector<int64_t>& lengths) {
    const Batch batch = CausalBatch(lengths, 1);
    Plan plan;
    PlanAttention(shape, batch.entries, batch.keys, &plan);
    std::vector<std::pair<int32_t, int32_t>> of_first;
    for (const WorkItem& item : plan.items) {
      if (item.packed_count > 0 && item.row_begin == 0) {
        of_first.emplace_back(item.strip_begin, item.strip_end);
      }
    }
    std::sort(of_first.begin(), of_first.end());
    return of_first;
  };
  EXPECT_EQ(cuts({9000}), cuts({9000, 5, 100000, 77}));
}

TEST(PlanTest, NothingToDo) {
  DecodePlanShape shape;
  shape.blocks = 4;
  Plan plan;
  PlanAttention(shape, {}, {}, &plan);
  ASSERT_EQ(plan.items.size(), 4u);
  for (const WorkItem& item : plan.items) EXPECT_EQ(item.packed_count, 0);
}

TEST(ArchitecturesTest, ADeviceRunsTheFirstEntryThatIsEnabledAndCoversIt) {
  EXPECT_TRUE(FeaturesOf(90).wgmma);
  EXPECT_TRUE(FeaturesOf(90).clusters);
  EXPECT_TRUE(FeaturesOf(90).early_launch);
  EXPECT_EQ(FeaturesOf(90, /*portable=*/true), Features{});
  // The portable code has none of what the device may have.
  for (const int32_t capability : {80, 86, 89, 120}) {
    EXPECT_EQ(FeaturesOf(capability), Features{}) << capability;
  }
  // sm_100 is registered, and chosen as soon as its entry is enabled.
  EXPECT_EQ(FeaturesOf(100).tcgen05, kHasSm100Kernels);
  std::array<Architecture, 3> table = kArchitectures;
  for (Architecture& entry : table) entry.enabled = true;
  for (const int32_t capability : {100, 103}) {
    EXPECT_TRUE(FeaturesOf(capability, false, table).tcgen05) << capability;
    EXPECT_TRUE(FeaturesOf(capability, false, table).clusters) << capability;
    EXPECT_EQ(FeaturesOf(capability, true, table), Features{}) << capability;
  }
  EXPECT_EQ(FeaturesOf(90, false, table), FeaturesOf(90));
  EXPECT_EQ(FeaturesOf(120, false, table), Features{});
  // The last can run wherever one of the others can.
  for (const Architecture& entry : kArchitectures) {
    EXPECT_GE(entry.min_capability, kArchitectures.back().min_capability) << entry.name;
    EXPECT_LE(entry.max_capability, kArchitectures.back().max_capability) << entry.name;
  }
}

// sm_100's kernel is chosen when the table of architectures enables its entry, for the head dims it
// is built for, and is left out where only portable code may run.
TEST(ChooseKernelTest, TakesTheKernelOfSm100WhereItsEntryIsEnabled) {
  auto table = kArchitectures;
  const auto sm100 = std::find_if(table.begin(), table.end(),
                                  [](const Architecture& a) { return a.features.tcgen05; });
  ASSERT_NE(sm100, table.end());
  const DeviceProperties device{100, 148};
  AttentionShape shape{SquareGeometry(4, 128, DType::kFp8E4M3), 32, 16};
  const auto choice = [&](bool enabled, bool portable) {
    sm100->enabled = enabled;
    return ChooseKernelWith(FeaturesOf(100, portable, table), device, shape);
  };
  EXPECT_EQ(choice(true, false).kind, KernelKind::kTcgen05);
  EXPECT_TRUE(choice(true, false).begins_early);
  EXPECT_EQ(choice(true, true).kind, KernelKind::kMma);
  EXPECT_EQ(choice(false, false).kind, KernelKind::kMma);
  EXPECT_EQ(ChooseKernel(device, shape).kind,
            kHasSm100Kernels ? KernelKind::kTcgen05 : KernelKind::kMma);
  EXPECT_EQ(LaunchedKind(choice(true, false), DType::kF32, 30.0f), KernelKind::kTcgen05);
  shape.geometry = SquareGeometry(4, 96, DType::kBf16);
  ASSERT_FALSE(HasKernel<&HeadDims::decode_sm100>(shape.geometry));
  EXPECT_EQ(choice(true, false).kind, KernelKind::kMma);
}

TEST(ChooseKernelTest, ByPackedRowsAndArchitecture) {
  AttentionShape shape{SquareGeometry(4, 128, DType::kFp8E4M3), 32, 16, 1, 1};
  const DeviceProperties hopper{90, 132};
  EXPECT_EQ(ChooseKernel(hopper, shape).tile_rows, 8);
  EXPECT_EQ(ChooseKernel(hopper, shape).blocks_per_multiprocessor, 1);
  shape.sequences = 128;
  EXPECT_EQ(ChooseKernel(hopper, shape).blocks_per_multiprocessor, 2);
  shape.max_rows = 8;
  EXPECT_EQ(ChooseKernel(hopper, shape).kind, KernelKind::kWgmmaFp8);
  EXPECT_EQ(ChooseKernel(hopper, shape).tile_rows, 64);
  EXPECT_EQ(ChooseKernel(hopper, shape, {.portable = true}).kind, KernelKind::kMma);
  EXPECT_EQ(ChooseKernel({89, 128}, shape).kind, KernelKind::kMma);
  // What a batch-invariant call runs on must not depend on the batch.
  shape.max_rows = 1;
  const int32_t blocks =
      ChooseKernel(hopper, shape, {.batch_invariant = true}).blocks_per_multiprocessor;
  shape.sequences = 1;
  EXPECT_EQ(ChooseKernel(hopper, shape, {.batch_invariant = true}).blocks_per_multiprocessor,
            blocks);
}

TEST(ChooseKernelTest, SixteenPackedRowsWhereTheyLeaveEnoughWarps) {
  const DeviceProperties hopper{90, 132};
  const auto kind = [&](DType kv, int32_t head_dim, KernelOptions options = {}) {
    return ChooseKernel(hopper, {SquareGeometry(4, head_dim, kv), 64, 16}, options).kind;
  };
  EXPECT_EQ(kind(DType::kBf16, 128), KernelKind::kMma);
  EXPECT_EQ(kind(DType::kFp8E4M3, 256), KernelKind::kMma);
  EXPECT_EQ(kind(DType::kBf16, 256), KernelKind::kWgmma);
  EXPECT_EQ(kind(DType::kBf16, 256, {.portable = true}), KernelKind::kMma);
}

TEST(ChooseKernelTest, StripsOfNvfp4ComeThroughSharedMemoryWhereRegistersAreFew) {
  const auto rings = [](int32_t capability, int32_t head_dim, int32_t q_heads,
                        DType kv = DType::kNvfp4) {
    return ChooseKernel({capability, 132}, {SquareGeometry(4, head_dim, kv), q_heads, 16}).rings;
  };
  EXPECT_TRUE(rings(90, 128, 64));
  EXPECT_TRUE(rings(90, 192, 32));
  EXPECT_FALSE(rings(90, 128, 32));
  EXPECT_FALSE(rings(90, 64, 64));
  EXPECT_FALSE(rings(90, 128, 64, DType::kFp8E4M3));
  for (const int32_t capability : {80, 89, 120}) EXPECT_FALSE(rings(capability, 128, 64));
}

// Queries that kWgmmaFp8 does not take go to kWgmma, which runs the same plans.
TEST(ChooseKernelTest, ALaunchTakesTheKernelThatItsQueriesAllow) {
  const DeviceProperties hopper{90, 132};
  const AttentionShape shape{SquareGeometry(4, 128, DType::kFp8E4M3), 32, 16, 16};
  const KernelChoice fp8 = ChooseKernel(hopper, shape);
  EXPECT_EQ(LaunchedKind(fp8, DType::kBf16, 0.0f), KernelKind::kWgmmaFp8);
  EXPECT_EQ(LaunchedKind(fp8, DType::kF16, 0.0f), KernelKind::kWgmma);
  EXPECT_EQ(LaunchedKind(fp8, DType::kBf16, 30.0f), KernelKind::kWgmma);
  const KernelChoice portable = ChooseKernel(hopper, shape, {.portable = true});
  EXPECT_EQ(LaunchedKind(portable, DType::kBf16, 0.0f), KernelKind::kMma);
}

// Whatever the table says, a row that mma_attention has is served, with any number of packed rows,
// by a kernel that is instantiated for it.
TEST(ChooseKernelTest, EveryRowOfTheTableHasAKernel) {
  const DeviceProperties hopper{90, 132, {66, 30, 15}};
  for (const HeadDims& dims : kHeadDims) {
    if (!dims.decode_sm80) continue;
    for (const DType kv :
         {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
      for (const int32_t rows : {1, 2, 4, 16, 100}) {
        const KvGeometry geometry{
            .kv_heads = 2, .key_dim = dims.key_dim, .value_dim = dims.value_dim, .dtype = kv};
        const AttentionShape shape{geometry, 16, 16, rows};
        ASSERT_TRUE(Validate(shape).ok());
        const KernelChoice choice = ChooseKernel(hopper, shape);
        const int32_t most = choice.kind == KernelKind::kMma ? 16 : 64;
        EXPECT_LE(choice.tile_rows, most);
        EXPECT_GT(choice.share_strips, 1);
        if (choice.kind != KernelKind::kMma) {
          EXPECT_TRUE(dims.decode_sm90);
        }
        EXPECT_EQ(choice.kind == KernelKind::kWgmmaFp8,
                  rows > 4 && HasWgmmaFp8(kv, dims.key_dim, dims.value_dim));
        // A plan of it covers all packed rows.
        const DecodePlanShape plan = DecodePlanShapeFor(choice, shape, hopper);
        EXPECT_EQ(plan.tile_rows, choice.tile_rows);
        EXPECT_GT(plan.split_cost, 0);
      }
    }
  }
}

TEST(ChooseKernelTest, SixteenPackedRowsOfFp8InLongCalls) {
  const DeviceProperties hopper{90, 132};
  const auto choose = [&](int32_t head_dim, int64_t total_keys, KernelOptions options = {},
                          int32_t rows = 2) {
    const AttentionShape shape{
        SquareGeometry(4, head_dim, DType::kFp8E4M3), 32, 16, rows, 32, total_keys};
    return ChooseKernel(hopper, shape, options);
  };
  EXPECT_EQ(choose(256, 24 << 10).kind, KernelKind::kMma);
  EXPECT_EQ(choose(256, 32 << 10).kind, KernelKind::kWgmma);
  EXPECT_EQ(choose(256, 32 << 10).tile_rows, 32);
  EXPECT_EQ(choose(128, 128 << 10).kind, KernelKind::kMma);
  EXPECT_EQ(choose(128, 256 << 10).kind, KernelKind::kWgmma);
  EXPECT_EQ(choose(64, 1 << 20).kind, KernelKind::kMma);
  EXPECT_EQ(choose(256, 1 << 20, {}, 1).kind, KernelKind::kMma);
  EXPECT_EQ(choose(256, 1 << 20, {.portable = true}).kind, KernelKind::kMma);
  EXPECT_EQ(choose(256, 1 << 20, {.batch_invariant = true}).kind, KernelKind::kMma);
}

TEST(ChooseKernelTest, ClustersForFewJobs) {
  const DeviceProperties hopper{90, 132, {66, 30, 15}};
  const auto cluster_size = [&](int32_t sequences, int32_t kv_heads, int32_t rows,
                                KernelOptions options = {}) {
    const AttentionShape shape{SquareGeometry(kv_heads, 128, DType::kFp8E4M3), 32, 16, rows,
                               sequences};
    return ChooseKernel(hopper, shape, options).cluster_size;
  };
  EXPECT_EQ(cluster_size(1, 4, 1), 8);
  EXPECT_EQ(cluster_size(2, 4, 1), 4);
  EXPECT_EQ(cluster_size(4, 4, 1), 2);
  EXPECT_EQ(cluster_size(8, 4, 1), 1);
  EXPECT_EQ(cluster_size(128, 4, 1), 1);
  AttentionShape long_shape{SquareGeometry(4, 128, DType::kFp8E4M3), 32, 16, 1, 1, 65536};
  EXPECT_EQ(ChooseKernel(hopper, long_shape).cluster_size, 2);
  long_shape.total_keys = 16384;
  EXPECT_EQ(ChooseKernel(hopper, long_shape).cluster_size, 8);
  long_shape.geometry.dtype = DType::kBf16;
  EXPECT_EQ(ChooseKernel(hopper, long_shape).cluster_size, 2);
  EXPECT_EQ(cluster_size(1, 4, 1, {.portable = true}), 1);
  EXPECT_EQ(cluster_size(1, 4, 1, {.batch_invariant = true}), 1);
  const AttentionShape shape{SquareGeometry(4, 128, DType::kFp8E4M3), 32, 16, 1, 1};
  const KernelChoice choice = ChooseKernel(hopper, shape);
  const DecodePlanShape plan = DecodePlanShapeFor(choice, shape, hopper);
  EXPECT_EQ(plan.blocks, 15);
  EXPECT_EQ(plan.share_strips, 8 * choice.share_strips);
  EXPECT_EQ(plan.split_cost, 8);  // 128 KB, of shares of 64
  EXPECT_TRUE(plan.lone_splits);
  EXPECT_TRUE(choice.begins_early);
  EXPECT_FALSE(ChooseKernel({89, 128}, shape).begins_early);
}

TEST(ChooseKernelTest, ClustersOfWideTiles) {
  const DeviceProperties hopper{90, 132, {66, 30, 15}};
  const auto cluster_size = [&](DType kv, int32_t sequences, int64_t total_keys) {
    const AttentionShape shape{SquareGeometry(8, 128, kv), 32, 16, 16, sequences, total_keys};
    return ChooseKernel(hopper, shape).cluster_size;
  };
  for (const DType kv : {DType::kBf16, DType::kFp8E4M3}) {
    EXPECT_EQ(cluster_size(kv, 1, 4096), 8);  // a cluster to a job
    EXPECT_EQ(cluster_size(kv, 2, 4096), 4);
    EXPECT_EQ(cluster_size(kv, 8, 32768), 2);
    EXPECT_EQ(cluster_size(kv, 32, 131072), 1);
  }
  EXPECT_EQ(cluster_size(DType::kBf16, 1, 4097), 4);
  EXPECT_EQ(cluster_size(DType::kBf16, 1, 32768), 2);
  // Pieces are collected as they come.
  EXPECT_EQ(cluster_size(DType::kFp8E4M3, 1, 4097), 1);
  EXPECT_EQ(cluster_size(DType::kFp8E4M3, 1, 32768), 1);
  EXPECT_EQ(cluster_size(DType::kFp8E4M3, 4, 32768), 1);
  EXPECT_EQ(cluster_size(DType::kFp8E4M3, 5, 32768), 2);
}

// What the products of wgmma_fp8_attention.cuh and the loads of mma_attention.cuh rest on.
TEST(PageLayoutTest, KeysLieAsProductsTakeThem) {
  for (int token = 0; token < kStripSlots; ++token) {
    const int row = KeyRow(token);
    EXPECT_EQ(token, row % 8 / 2 * 4 + row / 8 * 2 + row % 2);
    for (int chunk = 0; chunk < 4; ++chunk) {
      const size_t at = KeyOffset(token, chunk * kVectorBytes, 128, 1);
      EXPECT_EQ(at / kKeyPanelBytes, static_cast<size_t>(row));
      // 64-byte swizzle: bits 7 and 8 of an address are added to bits 4 and 5, without carry.
      EXPECT_EQ(at, (row * kKeyPanelBytes + chunk * kVectorBytes) ^ (at >> 7 & 3) << 4);
    }
  }
}

// A lane's load of the tail panel is its share of two rows, eight apart: as an operand takes them.
TEST(PageLayoutTest, TheTailPanelLiesAsLanesTakeIt) {
  EXPECT_EQ(KeyStride(80, 1), 96);  // padded
  EXPECT_EQ(KeyStride(80, 2), 160);
  EXPECT_EQ(KeyStride(96, 1), 96);
  EXPECT_EQ(KeyStride(192, 1), 192);
  constexpr size_t kTail = kStripSlots * kKeyPanelBytes;  // behind one full panel
  for (int token = 0; token < kStripSlots; ++token) {
    const int row = KeyRow(token);
    for (int byte = 0; byte < kKeyTailBytes; ++byte) {
      const int lane = row % 8 * 4 + byte / 8;
      EXPECT_EQ(KeyOffset(token, 64 + byte, 96, 1),
                kTail + lane * kVectorBytes + row / 8 * 8 + byte % 8);
    }
  }
}

TEST(PageLayoutTest, IsAPermutationOfThePlane) {
  for (int bytes : {1, 2}) {
    for (int head_dim : {64, 80, 96, 128, 192, 256}) {
      const int stride = KeyStride(head_dim, bytes);
      std::vector<int> keys(32 * stride), values(32 * head_dim * bytes);
      for (int token = 0; token < 32; ++token) {
        for (int d = 0; d < stride / bytes; ++d) {
          for (int i = 0; i < bytes; ++i) ++keys[KeyOffset(token, d, head_dim, bytes) + i];
        }
        for (int d = 0; d < head_dim; ++d) {
          for (int i = 0; i < bytes; ++i) ++values[ValueOffset(token, d, head_dim, bytes) + i];
        }
      }
      EXPECT_EQ(std::count(keys.begin(), keys.end(), 1), std::ssize(keys));
      EXPECT_EQ(std::count(values.begin(), values.end(), 1), std::ssize(values));
    }
  }
}

TEST(LateStripsTest, HoldTheTokensWhereverTheyEnd) {
  EXPECT_EQ(LateStripsOf(0), 0);
  for (int32_t tokens = 1; tokens < 70; ++tokens) {
    int32_t most = 0;
    for (int32_t end = tokens; end < tokens + kStripSlots; ++end) {
      most = std::max(most, (end - 1) / kStripSlots - (end - tokens) / kStripSlots + 1);
    }
    EXPECT_EQ(LateStripsOf(tokens), most) << tokens;
  }
}

}  // namespace
}  // namespace tributary::cuda
