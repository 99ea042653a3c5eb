// Plans against brute force over positions, and what planning costs.

#include "worker/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/poison.h"
#include "worker/choose_path.h"
#include "worker/plan_cache.h"

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int32_t kPageSize = 16;

RowMask CausalMask(int64_t window_left) { return {.window = {window_left, -1}}; }

// Tables of the entries' sequences, as one rank holds them, and the plans made over them.
class Planned {
 public:
  Planned(DcpLayout layout, PlanShape shape) : layout_(layout), shape_(shape), tables_(1 << 30) {
    shape_.page_size = kPageSize;
    if (shape_.rows_per_pass == 0) shape_.rows_per_pass = 1000;
  }

  // Pages of a sequence are 1000 * sequence + index; entries past `tokens` are wild.
  void AddTable(SequenceId sequence, int64_t tokens) {
    const int64_t page_tokens = int64_t{kPageSize} * layout_.size;
    PageUpdate update{sequence, 0, {}};
    for (int64_t i = 0; i * page_tokens < tokens; ++i) {
      update.pages.push_back(static_cast<int32_t>(1000 * sequence + i));
    }
    update.pages.push_back(test::kWildPage);
    tables_.Update(update);
  }

  std::vector<const PageTable*> TablesOf(const std::vector<StepEntry>& entries) const {
    std::vector<const PageTable*> found;
    for (const StepEntry& entry : entries) found.push_back(tables_.Find(entry.sequence));
    return found;
  }

  const StepPlan& Make(const std::vector<StepEntry>& entries) {
    PlanStep(shape_, layout_, entries, TablesOf(entries), &plan_);
    return plan_;
  }
  const StepPlan& FromCache(PlanCache& cache, const std::vector<StepEntry>& entries) {
    return cache.Get(shape_, layout_, entries, TablesOf(entries));
  }

  PageTables& tables() { return tables_; }

 private:
  DcpLayout layout_;
  PlanShape shape_;
  PageTables tables_;
  StepPlan plan_;
};

// ---- against brute force ----------------------------------------------------------------------

struct Geometry {
  int32_t size;
  int32_t interleave;
  StepKind kind;
  int64_t window_left;
};

std::vector<Geometry> Geometries() {
  std::vector<Geometry> all;
  for (const int32_t size : {1, 2, 3, 4, 8}) {
    for (const int32_t interleave : {1, 8, 16}) {
      for (const StepKind kind : {StepKind::kDecode, StepKind::kPrefill}) {
        for (const int64_t window : {-1, 0, 5, 40}) all.push_back({size, interleave, kind, window});
      }
    }
  }
  return all;
}

const std::vector<StepEntry> kMixed = {
    {.sequence = 1, .first_position = 0, .query_rows = 1, .new_tokens = 1},
    {.sequence = 2, .first_position = 97, .query_rows = 4, .new_tokens = 4},
    {.sequence = 3, .first_position = 15, .query_rows = 0, .new_tokens = 20},
    {.sequence = 4, .first_position = 60, .query_rows = 3, .new_tokens = 0},
    {.sequence = 5, .first_position = 33, .query_rows = 9, .new_tokens = 9, .replay = true},
    {.sequence = 6, .first_position = 21, .query_rows = 65, .new_tokens = 65},
    {.sequence = 7, .first_position = 21, .query_rows = 64, .new_tokens = 64},
};

int64_t End(const StepEntry& entry) {
  return entry.first_position + std::max(entry.query_rows, entry.new_tokens);
}

// By comparing positions, as the masks are defined.
std::set<int64_t> CacheKeysOf(const StepEntry& entry, int32_t row, const Geometry& g) {
  const int64_t position = entry.first_position + row;
  std::set<int64_t> keys;
  for (int64_t key = 0; key <= position; ++key) {
    if (g.window_left >= 0 && key < position - g.window_left) continue;
    if (g.kind == StepKind::kPrefill && entry.new_tokens > 64 && key >= entry.first_position) {
      continue;
    }
    keys.insert(key);
  }
  return keys;
}

TEST(Plan, EveryTokenHasOneOwnerAndItsSlot) {
  for (const Geometry& g : Geometries()) {
    std::vector<std::vector<int>> owners(kMixed.size());
    for (int32_t rank = 0; rank < g.size; ++rank) {
      const DcpLayout layout{rank, g.size, g.interleave};
      Planned planned(layout, {.kind = g.kind, .mask = CausalMask(g.window_left)});
      for (const StepEntry& entry : kMixed) planned.AddTable(entry.sequence, End(entry));
      const StepPlan& plan = planned.Make(kMixed);
      size_t at = 0;
      for (size_t e = 0; e < kMixed.size(); ++e) {
        const StepEntry& entry = kMixed[e];
        owners[e].resize(static_cast<size_t>(entry.new_tokens));
        for (int32_t i = 0; i < entry.new_tokens; ++i, ++at) {
          ASSERT_EQ(plan.entry_of_token[at], static_cast<int32_t>(e));
          const auto& [used, unused] = entry.replay
                                           ? std::tie(plan.compare_slots, plan.write_slots)
                                           : std::tie(plan.write_slots, plan.compare_slots);
          ASSERT_EQ(unused[at], kPadSlot);
          if (used[at] == kPadSlot) continue;
          ++owners[e][static_cast<size_t>(i)];
          // The number of this rank's tokens before it is its local slot.
          int64_t local = 0;
          for (int64_t t = 0; t < entry.first_position + i; ++t) {
            local += t / g.interleave % g.size == rank;
          }
          const auto page = static_cast<int64_t>(1000 * entry.sequence) + local / kPageSize;
          ASSERT_EQ(used[at], page * kPageSize + local % kPageSize);
        }
      }
      ASSERT_EQ(at, static_cast<size_t>(plan.new_tokens));
    }
    for (const auto& counts : owners) EXPECT_THAT(counts, ::testing::Each(1));
  }
}

TEST(Plan, RanksTogetherSeeTheKeysOfTheMaskOnce) {
  for (const Geometry& g : Geometries()) {
    std::vector<std::multiset<int64_t>> seen;
    for (int32_t rank = 0; rank < g.size; ++rank) {
      const DcpLayout layout{rank, g.size, g.interleave};
      Planned planned(layout, {.kind = g.kind, .mask = CausalMask(g.window_left)});
      for (const StepEntry& entry : kMixed) planned.AddTable(entry.sequence, End(entry));
      const StepPlan& plan = planned.Make(kMixed);
      seen.resize(static_cast<size_t>(plan.query_rows));
      for (size_t row = 0; row < seen.size(); ++row) {
        for (int64_t slot = plan.context_keys[row].lo; slot < plan.context_keys[row].hi; ++slot) {
          seen[row].insert(GlobalPosition(layout, slot));
        }
      }
    }
    size_t row = 0;
    for (const StepEntry& entry : kMixed) {
      for (int32_t i = 0; i < entry.query_rows; ++i, ++row) {
        const std::set<int64_t> expected = CacheKeysOf(entry, i, g);
        ASSERT_EQ(seen[row], std::multiset<int64_t>(expected.begin(), expected.end()))
            << "N " << g.size << " I " << g.interleave << " window " << g.window_left
            << " sequence " << entry.sequence << " row " << i;
      }
    }
  }
}

TEST(Plan, PagesHandedOnEndWithTheKeys) {
  for (const Geometry& g : Geometries()) {
    const DcpLayout layout{g.size - 1, g.size, g.interleave};
    Planned planned(layout, {.kind = g.kind, .mask = CausalMask(g.window_left)});
    for (const StepEntry& entry : kMixed) planned.AddTable(entry.sequence, End(entry));
    const StepPlan& plan = planned.Make(kMixed);
    for (const RowPass& pass : plan.passes) {
      for (const AttentionEntry& entry : pass.entries) {
        EXPECT_THAT(entry.pages, ::testing::Not(::testing::Contains(test::kWildPage)));
        for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
          const KeyRange keys = plan.context_keys[static_cast<size_t>(pass.row_begin + row)];
          if (!Empty(keys)) {
            EXPECT_LE(keys.hi, static_cast<int64_t>(entry.pages.size()) * kPageSize);
          }
        }
      }
    }
  }
}

TEST(Plan, RanksAgreeOnWhichPassesHaveContext) {
  // A context of 3 tokens with I = 1 over 8 ranks: most ranks hold none of it.
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 0, .query_rows = 80, .new_tokens = 80},
      {.sequence = 2, .first_position = 3, .query_rows = 80, .new_tokens = 80}};
  for (int32_t rank = 0; rank < 8; ++rank) {
    Planned planned({rank, 8, 1}, {.kind = StepKind::kPrefill, .rows_per_pass = 40});
    for (const StepEntry& entry : entries) planned.AddTable(entry.sequence, End(entry));
    const StepPlan& plan = planned.Make(entries);
    ASSERT_EQ(plan.passes.size(), 4u);
    EXPECT_FALSE(plan.passes[0].any_context);
    EXPECT_FALSE(plan.passes[1].any_context);
    EXPECT_TRUE(plan.passes[2].any_context);
    EXPECT_TRUE(plan.passes[3].any_context);
  }
}

TEST(Plan, ContextThatAWindowHasLeftBehindIsNoContext) {
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 1000, .query_rows = 80, .new_tokens = 80}};
  Planned planned({0, 2, 16},
                  {.kind = StepKind::kPrefill, .mask = CausalMask(8), .rows_per_pass = 40});
  planned.AddTable(1, 1080);
  const StepPlan& plan = planned.Make(entries);
  ASSERT_EQ(plan.passes.size(), 2u);
  EXPECT_TRUE(plan.passes[0].any_context);
  EXPECT_FALSE(plan.passes[1].any_context);
}

TEST(Plan, PassesCoverTheRowsInOrder) {
  Planned planned({0, 1, 16}, {.kind = StepKind::kDecode, .rows_per_pass = 5});
  for (const StepEntry& entry : kMixed) planned.AddTable(entry.sequence, End(entry));
  const StepPlan& plan = planned.Make(kMixed);
  int32_t row = 0;
  for (const RowPass& pass : plan.passes) {
    EXPECT_EQ(pass.row_begin, row);
    EXPECT_LE(pass.row_count, 5);
    int32_t in_pass = 0;
    for (const AttentionEntry& entry : pass.entries) {
      EXPECT_EQ(entry.row_begin, in_pass);
      in_pass += entry.row_count;
    }
    EXPECT_EQ(in_pass, pass.row_count);
    row += pass.row_count;
  }
  EXPECT_EQ(row, plan.query_rows);
}

TEST(Plan, RunsBreakWhereRowsAndTokensPart) {
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 0, .query_rows = 2, .new_tokens = 2},
      {.sequence = 2, .first_position = 4, .query_rows = 3, .new_tokens = 3},
      {.sequence = 3, .first_position = 9, .query_rows = 5, .new_tokens = 0},
      {.sequence = 4, .first_position = 0, .query_rows = 1, .new_tokens = 1},
      {.sequence = 5, .first_position = 0, .query_rows = 0, .new_tokens = 7},
      {.sequence = 6, .first_position = 1, .query_rows = 2, .new_tokens = 2}};
  Planned planned({0, 1, 16},
                  {.kind = StepKind::kPrefill, .mask = CausalMask(1), .max_decode_rows = 0});
  for (const StepEntry& entry : entries) planned.AddTable(entry.sequence, End(entry));
  const StepPlan& plan = planned.Make(entries);
  const auto run = [](int32_t row, int32_t token, int32_t count) {
    return ::testing::AllOf(::testing::Field(&NewTokensRun::row_begin, row),
                            ::testing::Field(&NewTokensRun::token_begin, token),
                            ::testing::Field(&NewTokensRun::count, count));
  };
  EXPECT_THAT(plan.runs, ElementsAre(run(0, 0, 5), run(10, 5, 1), run(11, 13, 2)));
  const auto keys = [&](size_t row) {
    return std::pair(plan.new_keys[row].lo, plan.new_keys[row].hi);
  };
  EXPECT_EQ(keys(1), std::pair(int64_t{0}, int64_t{2}));
  EXPECT_EQ(keys(4), std::pair(int64_t{1}, int64_t{3}));  // the window has left the first behind
  EXPECT_EQ(keys(5), std::pair(int64_t{0}, int64_t{0}));  // brings nothing
}

// How an entry's rows see what it brings is the entry's own affair.
TEST(Plan, EntriesWithFewTokensSeeThemInTheCacheBesideOnesWithMany) {
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 7, .query_rows = 11, .new_tokens = 11},
      {.sequence = 2, .first_position = 0, .query_rows = 64, .new_tokens = 64},
      {.sequence = 3, .first_position = 5, .query_rows = 65, .new_tokens = 65},
      {.sequence = 4, .first_position = 400, .query_rows = 100, .new_tokens = 0},
      {.sequence = 5, .first_position = 0, .query_rows = 1, .new_tokens = 1}};
  Planned planned({0, 1, 16}, {.kind = StepKind::kPrefill, .mask = CausalMask(-1)});
  for (const StepEntry& entry : entries) planned.AddTable(entry.sequence, End(entry));
  const StepPlan& plan = planned.Make(entries);
  ASSERT_EQ(plan.runs.size(), 1u);
  EXPECT_EQ(plan.runs[0].row_begin, 75);
  EXPECT_EQ(plan.runs[0].token_begin, 75);
  EXPECT_EQ(plan.runs[0].count, 65);
  EXPECT_EQ(plan.context_keys[10].hi, 18) << "its own token too";
  EXPECT_TRUE(Empty(plan.new_keys[10]));
  EXPECT_EQ(plan.context_keys[75].hi, 5);
  // Passes are of one way each, so none of a decode's rows goes another.
  const auto pass = [](int32_t begin, int32_t count, bool many, bool parts) {
    return ::testing::AllOf(::testing::Field(&RowPass::row_begin, begin),
                            ::testing::Field(&RowPass::row_count, count),
                            ::testing::Field(&RowPass::many_rows, many),
                            ::testing::Field(&RowPass::in_two_parts, parts));
  };
  EXPECT_THAT(plan.passes, ElementsAre(pass(0, 75, false, false), pass(75, 65, true, true),
                                       pass(140, 100, true, false), pass(240, 1, false, false)));
}

// Rows of a prompt that several steps carry out see what they see in one.
TEST(Plan, RowsOfAnEntryMayBeApart) {
  const StepEntry whole{.sequence = 1, .first_position = 37, .query_rows = 80, .new_tokens = 80};
  for (const int64_t window : {-1, 5, 60}) {
    for (const bool replay : {false, true}) {
      const DcpLayout layout{1, 2, 16};
      const PlanShape shape{.kind = StepKind::kPrefill, .mask = CausalMask(window)};
      Planned planned(layout, shape);
      Planned apart(layout, shape);
      for (const SequenceId id : {1, 2}) {
        planned.AddTable(id, 200);
        apart.AddTable(id, 200);
      }
      StepEntry entry = whole;
      entry.replay = replay;
      const StepPlan& want = planned.Make({entry});
      std::vector<KeyRange> context, fresh;
      for (const auto& [first, rows] : {std::pair{0, 9}, {9, 70}, {79, 1}}) {
        StepEntry part = entry;
        part.first_row = first;
        part.query_rows = rows;
        part.more_follows = first + rows < 80;
        // Beside another entry, whose rows and tokens begin where this one's end.
        const StepEntry other{.sequence = 2, .query_rows = 65, .new_tokens = 65};
        const StepPlan& plan = apart.Make({part, other});
        EXPECT_EQ(plan.query_rows, rows + 65);
        EXPECT_EQ(plan.new_tokens, 80 + 65);
        context.insert(context.end(), plan.context_keys.begin(), plan.context_keys.begin() + rows);
        fresh.insert(fresh.end(), plan.new_keys.begin(), plan.new_keys.begin() + rows);
        ASSERT_EQ(plan.runs.size(), 2u);
        EXPECT_EQ(plan.runs[0].entries[0].row_count, rows);
        EXPECT_EQ(plan.runs[0].entries[0].more_keys, 80 - rows);
        EXPECT_EQ(plan.runs[1].row_begin, rows);
        EXPECT_EQ(plan.runs[1].token_begin, 80);
        // Each writes or compares the tokens at the positions of its rows.
        const std::vector<int64_t>& slots = replay ? plan.compare_slots : plan.write_slots;
        const std::vector<int64_t>& all = replay ? want.compare_slots : want.write_slots;
        for (size_t t = 0; t < 80; ++t) {
          const int64_t slot = slots.empty() ? kPadSlot : slots[t];
          const bool own = t >= static_cast<size_t>(first) && t < static_cast<size_t>(first + rows);
          EXPECT_EQ(slot, own ? all[t] : kPadSlot) << t;
        }
      }
      const auto same = [](const KeyRange& a, const KeyRange& b) {
        return a.lo == b.lo && a.hi == b.hi;
      };
      EXPECT_TRUE(std::ranges::equal(context, want.context_keys, same));
      EXPECT_TRUE(std::ranges::equal(fresh, want.new_keys, same));
    }
  }
}

TEST(Plan, AppendsHaveNoRows) {
  Planned planned({0, 1, 16}, {.kind = StepKind::kAppend});
  planned.AddTable(1, 9);
  const StepPlan& plan = planned.Make({{.sequence = 1, .first_position = 4, .new_tokens = 5}});
  EXPECT_EQ(plan.write_slots.size(), 5u);
  EXPECT_THAT(plan.compare_slots, IsEmpty());
  EXPECT_THAT(plan.passes, IsEmpty());
}

// ---- cost -------------------------------------------------------------------------------------

TEST(Plan, CostDoesNotGrowWithTheLengthOfTheSequence) {
  std::map<int64_t, int64_t> lookups;
  for (const int64_t length : {int64_t{1} << 10, int64_t{1} << 20}) {
    Planned planned({1, 4, 16}, {.kind = StepKind::kDecode});
    planned.AddTable(1, length + 16);
    const StepPlan& plan = planned.Make(
        {{.sequence = 1, .first_position = length, .query_rows = 16, .new_tokens = 16}});
    lookups[length] = plan.table_lookups;
    EXPECT_EQ(plan.context_keys.size(), 16u);
    EXPECT_EQ(plan.passes.size(), 1u);
  }
  // One lookup a token owned: the 16 tokens of one turn of 4 x 16 are all one rank's or none.
  EXPECT_EQ(lookups[1 << 10], lookups[1 << 20]);
  EXPECT_LE(lookups[1 << 20], 16);
}

TEST(PlanCache, FindsAPlanByItsEntriesTablesKindAndWindow) {
  Planned planned({0, 2, 16}, {.kind = StepKind::kDecode});
  planned.AddTable(1, 100);
  planned.AddTable(2, 100);
  PlanCache cache;
  const StepEntry entry{.sequence = 1, .first_position = 50, .query_rows = 1, .new_tokens = 1};
  planned.FromCache(cache, {entry});
  planned.FromCache(cache, {entry});
  EXPECT_EQ(cache.made(), 1);
  EXPECT_EQ(cache.reused(), 1);

  StepEntry other = entry;
  other.replay = true;
  planned.FromCache(cache, {other});
  other = entry;
  other.first_position = 51;
  planned.FromCache(cache, {other});
  other = entry;
  other.sequence = 2;
  planned.FromCache(cache, {other});
  planned.FromCache(cache, {entry, other});
  EXPECT_EQ(cache.made(), 5);

  planned.tables().Update({1, 0, {7}});
  EXPECT_EQ(planned.FromCache(cache, {entry}).table_lookups, 0);  // 50 / 16 % 2: rank 1's token
  EXPECT_EQ(cache.made(), 6);
  planned.tables().Update({2, 0, {7}});  // of no concern to sequence 1
  planned.FromCache(cache, {entry});
  EXPECT_EQ(cache.made(), 6);
}

TEST(PlanCache, ATableMadeAgainIsAnotherTable) {
  Planned planned({0, 1, 16}, {.kind = StepKind::kDecode});
  planned.AddTable(1, 100);
  PlanCache cache;
  const StepEntry entry{.sequence = 1, .first_position = 50, .query_rows = 1, .new_tokens = 1};
  planned.FromCache(cache, {entry});
  planned.tables().Drop(1);
  planned.AddTable(1, 100);
  planned.FromCache(cache, {entry});
  EXPECT_EQ(cache.made(), 2);
}

TEST(PlanCache, KeepsTheMostRecentPlans) {
  Planned planned({0, 1, 16}, {.kind = StepKind::kDecode});
  planned.AddTable(1, 1000);
  PlanCache cache;
  const auto at = [](int64_t position) {
    return std::vector<StepEntry>{
        {.sequence = 1, .first_position = position, .query_rows = 1, .new_tokens = 1}};
  };
  for (int64_t p = 0; p < 100; ++p) {
    planned.FromCache(cache, at(p));
    planned.FromCache(cache, at(0));  // used all along: stays
  }
  EXPECT_EQ(cache.made(), 100);
  planned.FromCache(cache, at(99));
  EXPECT_EQ(cache.made(), 100);
  EXPECT_EQ(planned.FromCache(cache, at(1)).write_slots.front() % kPageSize, 1);
  EXPECT_EQ(cache.made(), 101);
}

// ---- choices ----------------------------------------------------------------------------------

TEST(ChoosePath, ByNewTokens) {
  EXPECT_EQ(ChoosePath(0, 5), StepKind::kAppend);
  EXPECT_EQ(ChoosePath(1, 1), StepKind::kDecode);
  EXPECT_EQ(ChoosePath(64, 64), StepKind::kDecode);
  EXPECT_EQ(ChoosePath(65, 65), StepKind::kPrefill);
  EXPECT_EQ(ChoosePath(500, 0), StepKind::kDecode);
  EXPECT_FALSE(SeesTokensAsTheyCame(64, 64));
  EXPECT_TRUE(SeesTokensAsTheyCame(65, 65));
  EXPECT_FALSE(SeesTokensAsTheyCame(500, 0));
  EXPECT_FALSE(SeesTokensAsTheyCame(0, 500));
}

TEST(RowsPerPass, BoundsThePartials) {
  const auto rows = [](int32_t q_heads, int32_t head_dim, int32_t value_dim = 0) {
    CacheSpec spec;
    spec.q_heads = spec.kv_heads = q_heads;
    spec.head_dim = head_dim;
    spec.value_head_dim = value_dim;
    spec.layers.resize(1);
    return RowsPerPass(spec);
  };
  EXPECT_EQ(rows(32, 128), 1024);
  EXPECT_EQ(rows(32, 192, 128), 1024);  // partials have the dims of values
  EXPECT_EQ(rows(16384, 256), 1);       // never none
  EXPECT_GE(rows(1, 64), 4096);

  // The widest layer decides for all, so that they share plans.
  CacheSpec spec;
  spec.q_heads = spec.kv_heads = 8;
  spec.head_dim = 64;
  spec.layers.resize(2);
  spec.layers[1].q_heads = 32;
  spec.layers[1].head_dim = 128;
  EXPECT_EQ(RowsPerPass(spec), 1024);
}

// ---- drafts -----------------------------------------------------------------------------------

bool DraftSees(const RowMask& mask, int64_t anchor, int32_t block, int32_t row, int64_t key) {
  const int64_t position = anchor + row;
  const int64_t base = mask.base == WindowBase::kAnchor ? anchor : position;
  if (key >= anchor + block || (mask.causal && key > position)) return false;
  return (mask.window.left < 0 || base - key <= mask.window.left) &&
         (mask.window.right < 0 || key - base <= mask.window.right);
}

TEST(Drafts, RowsSeeTheirContextByLocalSlotsAndTheirBlockByItsRows) {
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 0, .query_rows = 5, .new_tokens = 5},
      {.sequence = 2, .first_position = 49, .query_rows = 16, .new_tokens = 16},
      {.sequence = 3, .first_position = 7, .query_rows = 1, .new_tokens = 1}};
  for (const RowMask& mask :
       {RowMask{.causal = false}, RowMask{.window = {10, 3}, .causal = false},
        RowMask{.window = {10, 3}, .base = WindowBase::kAnchor, .causal = false},
        RowMask{.window = {20, -1}, .base = WindowBase::kAnchor, .causal = true}}) {
    for (const int32_t size : {1, 3, 4}) {
      for (int32_t rank = 0; rank < size; ++rank) {
        const DcpLayout layout{rank, size, 4};
        Planned planned(layout, {.kind = StepKind::kDflash, .mask = mask, .rows_per_pass = 9});
        for (SequenceId id = 1; id <= 3; ++id) planned.AddTable(id, id == 2 ? 49 : id == 3 ? 7 : 0);
        const StepPlan& plan = planned.Make(entries);
        EXPECT_THAT(plan.write_slots, IsEmpty());
        EXPECT_THAT(plan.compare_slots, IsEmpty());
        EXPECT_EQ(plan.table_lookups, 0);
        ASSERT_EQ(plan.runs.size(), 1u);
        EXPECT_EQ(plan.runs[0].count, 22);
        size_t row = 0;
        for (const StepEntry& entry : entries) {
          for (int32_t i = 0; i < entry.query_rows; ++i, ++row) {
            const KeyRange context = plan.context_keys[row];
            const KeyRange block = plan.new_keys[row];
            for (int64_t key = 0; key < entry.first_position + entry.query_rows; ++key) {
              const bool sees = DraftSees(mask, entry.first_position, entry.query_rows, i, key);
              if (key >= entry.first_position) {
                const int64_t at = key - entry.first_position;
                ASSERT_EQ(at >= block.lo && at < block.hi, sees);
              } else if (OwnerOf(layout, key) == rank) {
                const int64_t slot = LocalSlot(layout, key);
                ASSERT_EQ(slot >= context.lo && slot < context.hi, sees);
              }
            }
          }
        }
      }
    }
  }
}

TEST(Drafts, PlansDifferByMaskAndAreFoundAgain) {
  PlanCache cache;
  const std::vector<StepEntry> entries = {
      {.sequence = 1, .first_position = 20, .query_rows = 4, .new_tokens = 4}};
  LayerSpec full;
  LayerSpec sliding;
  sliding.window = {8, 8};
  LayerSpec anchored = sliding;
  anchored.window_base = WindowBase::kAnchor;
  for (const LayerSpec& layer : {full, sliding, anchored, full, sliding, anchored}) {
    Planned planned({0, 2, 16},
                    {.kind = StepKind::kDflash, .mask = MaskOf(layer, StepKind::kDflash)});
    planned.AddTable(1, 20);
    planned.FromCache(cache, entries);
  }
  EXPECT_EQ(cache.made(), 3);
  EXPECT_EQ(cache.reused(), 3);
  // Causal steps see the left side of the window alone.
  EXPECT_EQ(MaskOf(sliding, StepKind::kDecode), MaskOf(anchored, StepKind::kPrefill));
  EXPECT_FALSE(MaskOf(sliding, StepKind::kDecode) == MaskOf(full, StepKind::kDecode));
  EXPECT_EQ(MaskOf(sliding, StepKind::kAppend), MaskOf(full, StepKind::kAppend));
}

// ---- shared beginnings
// ---------------------------------------------------------------------------

// Forks are planned together as far as they have the same pages, on every rank alike.
TEST(PlanTest, PassesSayWhatTheirEntriesShare) {
  for (const int32_t ranks : {1, 4}) {
    constexpr int32_t kUnit = static_cast<int32_t>(kSharedSlots / kPageSize);
    PageTables tables(1 << 30, kUnit);
    PageUpdate parent{1, 0, {}};
    for (int32_t page = 0; page < 3 * kUnit; ++page) parent.pages.push_back(page);
    tables.Update(parent);
    PageUpdate fork = parent;
    fork.sequence = 2;
    fork.pages[2 * kUnit + 5] = 5000;  // copied when it was written to
    tables.Update(fork);
    const PageUpdate stranger{3, 0, {7000, 7001}};
    tables.Update(stranger);
    const int64_t tokens = int64_t{ranks} * kPageSize;  // of a virtual page
    const std::vector<StepEntry> entries = {
        {.sequence = 1, .first_position = 3 * kUnit * tokens - 1, .query_rows = 1, .new_tokens = 1},
        {.sequence = 3, .first_position = tokens, .query_rows = 1, .new_tokens = 1},
        {.sequence = 2, .first_position = 3 * kUnit * tokens - 9, .query_rows = 2, .new_tokens = 2},
    };
    const std::vector<const PageTable*> found = {tables.Find(1), tables.Find(3), tables.Find(2)};
    StepPlan plan;
    PlanStep({.mask = CausalMask(-1), .page_size = kPageSize, .rows_per_pass = 1000},
             {.rank = ranks - 1, .size = ranks, .interleave = kPageSize}, entries, found, &plan);
    ASSERT_EQ(plan.passes.size(), 1u);
    ASSERT_EQ(plan.passes[0].shared.size(), 1u);
    EXPECT_EQ(plan.passes[0].shared[0].slots.lo, 0);
    EXPECT_EQ(plan.passes[0].shared[0].slots.hi, 2 * kSharedSlots);
    EXPECT_THAT(plan.passes[0].shared[0].entries, ElementsAre(0, 2));
  }
}

}  // namespace
}  // namespace tributary::worker
