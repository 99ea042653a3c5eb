// The block a step's plan becomes: what is in it, where, and when two blocks are laid out alike.
#include "worker/cuda/device_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/params.h"
#include "tests/worker/specs.h"
#include "tests/worker/test_host.h"
#include "worker/plan_cache.h"

namespace tributary::worker::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

const DevicePlanOptions kH200{.device = {.compute_capability = 90, .multiprocessors = 132}};

// One rank of a group and the tables of a few sequences.
class DevicePlanTest : public ::testing::Test {
 protected:
  DevicePlanTest() {
    spec_.num_pages = 4096;
    types_.geometry = GeometryOf(spec_, spec_.layers[0]);
    for (SequenceId id = 1; id <= 3; ++id) {
      PageUpdate table{.sequence = id};
      for (int32_t i = 0; i < 1000; ++i) table.pages.push_back(static_cast<int32_t>(id) + 4 * i);
      tables_.Update(table);
    }
  }

  const DevicePlan& Make(StepKind kind, const std::vector<StepEntry>& entries) {
    std::vector<const PageTable*> tables;
    for (const StepEntry& entry : entries) tables.push_back(tables_.Find(entry.sequence));
    plan_ = &plans_.Get({.kind = kind, .page_size = spec_.page_size, .rows_per_pass = 128},
                        {.rank = 0, .size = 2, .interleave = 16}, entries, tables);
    types_.draft = kind == StepKind::kDflash;
    device_plan_.Make(spec_, *plan_, types_, kH200);
    block_.assign(device_plan_.bytes(), std::byte{0x55});
    device_plan_.Write(block_.data());
    return device_plan_;
  }

  template <typename T>
  std::vector<T> Read(const Section& section, size_t count) const {
    std::vector<T> values(count);
    std::memcpy(values.data(), block_.data() + section.offset, count * sizeof(T));
    return values;
  }
  template <typename T>
  std::vector<T> Read(const Section& section) const {
    return Read<T>(section, section.count);
  }

  CacheSpec spec_ = SmallSpec();
  StepTypes types_{.heads = {1, 2}};
  PageTables tables_{4096};
  PlanCache plans_;
  const StepPlan* plan_ = nullptr;
  DevicePlan device_plan_;
  std::vector<std::byte> block_;
};

TEST(PaddedCountTest, IsExactForFewAndAtMostAQuarterMore) {
  EXPECT_EQ(PaddedCount(0), 0);
  int32_t last = 0;
  std::vector<int32_t> of_a_doubling;
  for (int32_t n = 1; n <= 5000; ++n) {
    const int32_t padded = PaddedCount(n);
    EXPECT_GE(padded, n);
    EXPECT_LE(4 * padded, 5 * n);
    EXPECT_GE(padded, last);
    EXPECT_EQ(PaddedCount(padded), padded);
    if (n <= 8) {
      EXPECT_EQ(padded, n);
    }
    if (n > 64 && n <= 128 && padded != last) of_a_doubling.push_back(padded);
    last = padded;
  }
  EXPECT_THAT(of_a_doubling, ElementsAre(80, 96, 112, 128));
}

TEST_F(DevicePlanTest, HoldsSlotsTablesAndKeysAndPadsTheRest) {
  const DevicePlan& made = Make(StepKind::kDecode, {{1, 100, 4, 4}, {2, 40, 6, 6}});
  EXPECT_TRUE(made.IsOf(*plan_, types_));
  EXPECT_FALSE(made.IsOf(*plan_, {.q = DType::kF16, .heads = types_.heads}));
  EXPECT_TRUE(made.repeatable());
  EXPECT_EQ(made.padded_tokens(), 10);
  EXPECT_EQ(made.padded_rows(), 10);
  EXPECT_EQ(made.RowsOf(plan_->passes[0]), 10);
  EXPECT_THAT(Read<int64_t>(made.write_slots()), ElementsAreArray(plan_->write_slots));
  EXPECT_EQ(made.compare_slots().count, 0u);
  EXPECT_EQ(made.entries(), 0);

  ASSERT_FALSE(made.pass(0).many_rows);
  const AttentionLaunch& launch = made.pass(0).few;
  EXPECT_EQ(launch.blocks, 132 / launch.choice.cluster_size);  // clusters take items
  std::vector<int32_t> tables;
  for (const AttentionEntry& entry : plan_->passes[0].entries) {
    tables.insert(tables.end(), entry.pages.begin(), entry.pages.end());
  }
  EXPECT_THAT(Read<int32_t>(launch.tables), ElementsAreArray(tables));
  const auto keys = Read<cuda::RowKeys>(launch.keys);
  ASSERT_EQ(keys.size(), 10u);
  for (size_t row = 0; row < keys.size(); ++row) {
    EXPECT_EQ(keys[row].end - keys[row].begin, Length(plan_->context_keys[row]));
  }
  for (const Section& s : {made.write_slots(), launch.items, launch.keys, launch.tables}) {
    EXPECT_EQ(s.offset % 256, 0u);
    EXPECT_LT(s.offset, made.bytes());
  }
}

TEST_F(DevicePlanTest, TokensBeyondThePlanArePadding) {
  const DevicePlan& made = Make(StepKind::kAppend, {{1, 0, 0, 17}});
  EXPECT_EQ(made.padded_tokens(), 20);
  const auto slots = Read<int64_t>(made.write_slots(), 20);
  EXPECT_THAT(std::vector(slots.begin(), slots.begin() + 17), ElementsAreArray(plan_->write_slots));
  EXPECT_THAT(std::vector(slots.begin() + 17, slots.end()), Each(kPadSlot));
}

TEST_F(DevicePlanTest, TokensAreListedWhereQuadsWouldBeTorn) {
  const DevicePlan& made = Make(StepKind::kPrefill, {{1, 37, 300, 300}});
  ASSERT_GT(made.listed_tokens().count, 0u);
  EXPECT_EQ(made.append_places(), PaddedCount(static_cast<int32_t>(made.write_slots().count)));
  const auto slots = Read<int64_t>(made.write_slots());
  const auto tokens = Read<int32_t>(made.listed_tokens());
  ASSERT_EQ(slots.size(), tokens.size());
  std::vector<int64_t> written(plan_->write_slots.size(), kPadSlot);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] != kPadSlot) written[static_cast<size_t>(tokens[i])] = slots[i];
  }
  EXPECT_EQ(written, plan_->write_slots);
  EXPECT_EQ(Make(StepKind::kAppend, {{1, 0, 0, 17}}).listed_tokens().count, 0u);
  EXPECT_EQ(Make(StepKind::kAppend, {{1, 37, 0, 300}}).listed_tokens().count, 0u) << "a graph";
  EXPECT_GT(Make(StepKind::kAppend, {{1, 37, 0, 2000}}).listed_tokens().count, 0u);
}

TEST_F(DevicePlanTest, RepeatsAreComparedByEntry) {
  const DevicePlan& made =
      Make(StepKind::kDecode, {{1, 5, 1, 1}, {2, 0, 3, 3, /*replay=*/true}, {3, 9, 1, 1}});
  EXPECT_EQ(made.entries(), 3);
  EXPECT_THAT(Read<int32_t>(made.entry_of_token()), ElementsAre(0, 1, 1, 1, 2));
  EXPECT_THAT(Read<int64_t>(made.compare_slots()), ElementsAreArray(plan_->compare_slots));
}

// The next token of the same sequences: everything lies where it lay, so that a graph still fits.
TEST_F(DevicePlanTest, StepsThatFollowEachOtherAreLaidOutAlike) {
  const std::vector<uint64_t> first =
      Make(StepKind::kDecode, {{1, 1000, 1, 1}, {2, 500, 1, 1}}).Signature();
  const StepPlan before = *plan_;
  EXPECT_EQ(Make(StepKind::kDecode, {{1, 1001, 1, 1}, {2, 501, 1, 1}}).Signature(), first);
  EXPECT_FALSE(device_plan_.IsOf(before, types_));
  EXPECT_NE(Make(StepKind::kDecode, {{1, 1002, 16, 16}, {2, 502, 1, 1}}).Signature(), first);
  EXPECT_NE(Make(StepKind::kDecode, {{1, 1002, 1, 1}}).Signature(), first);
}

// A draft's block does not depend on how long the context has become.
TEST_F(DevicePlanTest, DraftsThatFollowEachOtherAreLaidOutAlike) {
  const auto draft = [&](int64_t first, int32_t block) {
    const DevicePlan& made = Make(StepKind::kDflash, {{1, first, block, block}, {2, 500, 8, 8}});
    EXPECT_TRUE(made.repeatable());
    EXPECT_EQ(made.new_tokens(), nullptr);
    EXPECT_EQ(made.write_slots().count, 0u);
    return made.Signature();
  };
  const std::vector<uint64_t> first = draft(1000, 16);
  EXPECT_EQ(draft(1001, 16), first);
  EXPECT_EQ(draft(1017, 16), first);
  EXPECT_NE(draft(1017, 15), first) << "its rows and tokens are not padded";
}

TEST_F(DevicePlanTest, QueriesAreRoundedWhereTheCacheIsFp8) {
  const auto few = [&] { return Make(StepKind::kDecode, {{1, 1000, 4, 4}}).pass(0).few.choice; };
  const auto many = [&] { return Make(StepKind::kPrefill, {{1, 1000, 90, 90}}); };
  spec_.fp8_queries = true;
  EXPECT_FALSE(few().fp8_queries);
  const std::vector<uint64_t> plain = device_plan_.Signature();
  types_.geometry.kv.dtype = DType::kFp8E5M2;
  EXPECT_TRUE(few().fp8_queries);
  EXPECT_NE(device_plan_.Signature(), plain);
  const DevicePlan made = many();
  EXPECT_TRUE(made.pass(0).many.choice.fp8_queries);
  EXPECT_FALSE(made.pass(0).many.choice.fp8_weights);
  spec_.fp8_weights = true;
  EXPECT_TRUE(many().pass(0).many.choice.fp8_weights);
  EXPECT_FALSE(made.new_tokens()->choice.fp8_queries);
  types_.geometry.kv.dtype = DType::kBf16;
  EXPECT_FALSE(many().pass(0).many.choice.fp8_queries);
}

// A pass may end inside a block: its rows see all the tokens of the block all the same.
TEST_F(DevicePlanTest, ABlockInTwoPassesKeepsItsTokens) {
  const DevicePlan& made = Make(StepKind::kDflash, {{1, 100, 60, 60}, {2, 40, 90, 90}});
  EXPECT_FALSE(made.repeatable());
  ASSERT_EQ(plan_->passes.size(), 2u);
  EXPECT_EQ(made.block_keys().count, 150u);
  std::vector<int> seen(150, 0);
  for (size_t i = 0; i < 2; ++i) {
    const BlockLaunch& launch = made.pass(i).block;
    for (const cuda::BlockEntry& entry : Read<cuda::BlockEntry>(launch.entries)) {
      EXPECT_LE(entry.row_count, launch.most_rows);
      const int32_t row = plan_->passes[i].row_begin + entry.row_begin;
      EXPECT_EQ(entry.token_begin, row < 60 ? 0 : 60);
      EXPECT_EQ(entry.token_count, row < 60 ? 60 : 90);
      for (int32_t r = row; r < row + entry.row_count; ++r) ++seen[static_cast<size_t>(r)];
    }
  }
  EXPECT_THAT(seen, Each(1));
  // Rows count tokens as k and v do; here each sees those up to its own.
  const std::vector<cuda::RowKeys> keys = Read<cuda::RowKeys>(made.block_keys());
  ASSERT_EQ(keys.size(), 150u);
  for (size_t row = 0; row < keys.size(); ++row) {
    EXPECT_EQ(keys[row].begin, row < 60 ? 0 : 60) << "row " << row;
    EXPECT_EQ(keys[row].end, static_cast<int32_t>(row) + 1) << "row " << row;
  }
}

// Every row and head of the slice is written by the new tokens' part, also those of rows without
// tokens, and many rows over the context take the prefill kernels.
TEST_F(DevicePlanTest, APrefillWritesEveryRowOfTheSlice) {
  const DevicePlan& made =
      Make(StepKind::kPrefill, {{1, 100, 70, 70}, {2, 3, 2, 0}, {3, 10, 5, 5}});
  EXPECT_FALSE(made.repeatable());
  ASSERT_NE(made.new_tokens(), nullptr);
  const PrefillLaunch& launch = *made.new_tokens();
  EXPECT_EQ(launch.shape.head_begin, 1);
  EXPECT_EQ(launch.shape.head_count, 2);
  std::vector<int> written(77 * 4, 0);
  for (const cuda::PrefillItem& item : Read<cuda::PrefillItem>(launch.items)) {
    for (int32_t row = item.row_begin; row < item.row_begin + item.row_count; ++row) {
      ++written[static_cast<size_t>(row * 4 + item.head)];
    }
  }
  for (size_t row = 0; row < 77; ++row) {
    EXPECT_EQ(written[row * 4 + 0], 0);
    EXPECT_EQ(written[row * 4 + 1], 1) << "row " << row;
    EXPECT_EQ(written[row * 4 + 2], 1) << "row " << row;
    EXPECT_EQ(written[row * 4 + 3], 0);
  }
  ASSERT_TRUE(made.pass(0).many_rows);
  const PrefillLaunch& context = made.pass(0).many;
  EXPECT_EQ(context.shape.head_count, spec_.q_heads);
  EXPECT_GE(context.workspace_slots, 128);
  EXPECT_GE(made.workspace_bytes(), context.workspace_bytes);
}

// What serves a row does not depend on the rows beside it, nor on where a pass ends.
TEST_F(DevicePlanTest, EachEntryIsServedByTheKernelsForItsOwnRows) {
  const DevicePlan& made =
      Make(StepKind::kDecode, {{1, 100, 3, 3}, {2, 500, 148, 0}, {3, 10, 64, 64}});
  ASSERT_EQ(plan_->passes.size(), 4u);
  EXPECT_FALSE(made.pass(0).many_rows);
  EXPECT_TRUE(made.pass(1).many_rows);
  EXPECT_TRUE(made.pass(2).many_rows) << "the last 20 of 148 rows";
  EXPECT_FALSE(made.pass(3).many_rows);
}

// Forks of a long sequence: what they share is a launch of its own, over the rows of all.
TEST(SharedDevicePlanTest, ForksReadTheirPagesTogether) {
  constexpr int32_t kForks = 16;
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 8, 4, 128);
  spec.num_pages = 1 << 20;
  const auto unit = static_cast<int32_t>(kSharedSlots / spec.page_size);
  PageTables tables(spec.num_pages, unit);
  std::vector<StepEntry> entries;
  std::vector<const PageTable*> found;
  for (SequenceId id = 1; id <= kForks + 1; ++id) {
    PageUpdate table{.sequence = id};
    // The second is a stranger.
    for (int32_t i = 0; i < 8 * unit; ++i) table.pages.push_back(i + (id == 2 ? 100000 : 0));
    table.pages.push_back(200000 + static_cast<int32_t>(id));
    tables.Update(table);
    entries.push_back({id, 8 * kSharedSlots + static_cast<int64_t>(id % 7), 1, 1});
  }
  for (const StepEntry& entry : entries) found.push_back(tables.Find(entry.sequence));
  const auto plan_of = [&](const cuda::KernelOptions& kernels) {
    StepPlan plan;
    PlanStep({.kind = StepKind::kDecode, .page_size = spec.page_size, .rows_per_pass = 128},
             {.rank = 0, .size = 1, .interleave = 16}, entries, found, &plan);
    DevicePlanOptions options = kH200;
    options.kernels = kernels;
    DevicePlan made;
    made.Make(spec, plan, {.geometry = GeometryOf(spec, spec.layers[0])}, options);
    return made;
  };
  const DevicePlan made = plan_of({});
  const SharedLaunch& shared = made.pass(0).shared;
  EXPECT_EQ(shared.rows, kForks);
  EXPECT_EQ(made.gathered_rows(), kForks);
  EXPECT_EQ(shared.gathered.count, static_cast<size_t>(kForks)) << "a stranger stands between";
  EXPECT_EQ(shared.launch.choice.tile_rows, 64);
  EXPECT_LT(made.pass(0).few.shape.total_keys, 9 * kSharedSlots) << "the stranger and the ends";
  std::vector<std::byte> block(made.bytes());
  made.Write(block.data());
  std::vector<int32_t> rows(kForks);
  std::memcpy(rows.data(), block.data() + shared.gathered.offset, kForks * sizeof(int32_t));
  EXPECT_EQ(rows[0], 0);
  for (int32_t i = 1; i < kForks; ++i) EXPECT_EQ(rows[static_cast<size_t>(i)], i + 1);
  const std::vector<uint64_t> signature = made.Signature();
  for (StepEntry& entry : entries) ++entry.first_position;
  EXPECT_EQ(plan_of({}).Signature(), signature) << "the next token";

  // A result that is independent of its company does not depend on who shares its pages.
  EXPECT_EQ(plan_of({.batch_invariant = true}).pass(0).shared.rows, 0);
  EXPECT_NE(plan_of({.batch_invariant = true}).Signature(), signature);
}

}  // namespace
}  // namespace tributary::worker::testing
