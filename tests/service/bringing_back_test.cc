// Sequences of which tokens are lost for good: what is missing, who may bring it, and when they are
// whole again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/schedule/range_steps.h"
#include "service/schedule/sequence_table.h"
#include "service/schedule/sequence_updates.h"

namespace tributary::service {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;
using Range = PositionRange;

// Four ranks, 16 tokens each of a virtual page, none of which is kept twice.
class BringingBackTest : public ::testing::Test {
 protected:
  explicit BringingBackTest(int32_t layers = 1, int32_t interleave = 16)
      : table_({.layers = layers,
                .ranks = 4,
                .page_size = 16,
                .interleave = interleave,
                .pages = 32,
                .max_sequences = 8,
                .name = "c"}) {}

  void Add(SequenceId id, int32_t tokens) {
    bool reopened = false;
    ASSERT_TRUE(table_.Open(id, &reopened).ok());
    for (int32_t layer = 0; layer < table_.geometry().layers; ++layer) {
      const absl::Status done = Append(layer, {{id, 0, tokens}});
      ASSERT_TRUE(done.ok()) << done;
    }
  }
  struct Tokens {
    SequenceId id = 0;
    int64_t first = 0;
    int32_t count = 0;
  };
  absl::StatusOr<StepReservation> Reserve(int32_t layer, const std::vector<Tokens>& all) {
    std::vector<worker::StepEntry> entries;
    for (const Tokens& tokens : all) {
      entries.push_back(
          {.sequence = tokens.id, .first_position = tokens.first, .new_tokens = tokens.count});
    }
    return table_.Reserve(layer, worker::StepKind::kAppend, entries);
  }
  absl::Status Append(int32_t layer, const std::vector<Tokens>& all) {
    const auto reserved = Reserve(layer, all);
    if (reserved.ok()) table_.Commit(*reserved);
    return reserved.status();
  }
  absl::Status Look(SequenceId id, int32_t layer = 0) {
    const auto reserved = table_.Reserve(
        layer, worker::StepKind::kDecode,
        {{.sequence = id, .first_position = table_.Find(id)->lengths[layer] - 1, .query_rows = 1}});
    if (reserved.ok()) table_.Commit(*reserved);
    return reserved.status();
  }
  std::vector<Range> Missing(SequenceId id, int32_t layer = 0) {
    const auto missing = MissingTokensOf(Look(id, layer));
    return missing.has_value() ? missing->ranges : std::vector<Range>();
  }
  void Lose(const std::vector<int>& ranks) {
    std::vector<bool> fresh(4, false);
    for (const int rank : ranks) fresh[static_cast<size_t>(rank)] = true;
    table_.StopTransfers();
    table_.MarkLostOn(fresh);
  }

  SequenceTable table_;
};

// The field is that of the update, and what is missing is still told.
TEST_F(BringingBackTest, AnUpdateThatNeedsLostTokensNamesThem) {
  Add(1, 200);
  Lose({2});
  using Kind = SequenceUpdate::Kind;
  const absl::Status refused =
      ApplyUpdates({{Kind::kOpen, 5}, {Kind::kFork, 6, /*parent=*/1, /*length=*/100}}, nullptr,
                   &table_)
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_EQ(FieldOf(refused), "updates[1].fork.parent_id");
  const auto missing = MissingTokensOf(refused);
  ASSERT_TRUE(missing.has_value());
  EXPECT_EQ(missing->sequence, 1u);
  EXPECT_EQ(missing->ranges.front().begin, 32);
}

TEST_F(BringingBackTest, WhatIsMissingIsNamedAndBroughtInOrder) {
  Add(1, 200);
  const int32_t used = table_.pages().used();
  Lose({2});
  const absl::Status lost = Look(1);
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  const auto missing = MissingTokensOf(lost);
  ASSERT_TRUE(missing.has_value());
  EXPECT_EQ(missing->sequence, 1u);
  EXPECT_EQ(missing->layer, 0);
  EXPECT_THAT(missing->ranges, ElementsAre(Range{32, 48}, Range{96, 112}, Range{160, 176}));
  EXPECT_EQ(missing->tokens, 48);
  EXPECT_EQ(table_.pages().used(), used) << "what is left is kept";

  // Not what is there, not the wrong one first, not beyond the end of a range, not at the end.
  for (const Tokens& wrong : {Tokens{1, 96, 16}, Tokens{1, 40, 8}, Tokens{1, 32, 17},
                              Tokens{1, 16, 32}, Tokens{1, 200, 1}}) {
    const absl::Status refused = Append(0, {wrong});
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << wrong.first << ": " << refused;
    EXPECT_EQ(FieldOf(refused), "entries[0].first_position");
    EXPECT_EQ(MissingTokensOf(refused)->ranges, missing->ranges);
  }
  EXPECT_TRUE(Append(0, {{1, 32, 10}}).ok());
  EXPECT_THAT(Missing(1), ElementsAre(Range{42, 48}, Range{96, 112}, Range{160, 176}));
  EXPECT_TRUE(Append(0, {{1, 42, 6}, {1, 96, 16}, {1, 160, 4}}).ok());
  EXPECT_THAT(Missing(1), ElementsAre(Range{164, 176}));
  EXPECT_EQ(table_.lost(), 1);
  EXPECT_TRUE(Append(0, {{1, 164, 12}}).ok());
  EXPECT_EQ(table_.lost(), 0);
  EXPECT_TRUE(Look(1).ok());
  EXPECT_TRUE(Append(0, {{1, 200, 1}}).ok());
  EXPECT_EQ(table_.Find(1)->lengths[0], 201);
}

TEST_F(BringingBackTest, WhatWasBroughtOrIsLeftIsCompared) {
  Add(1, 100);
  Lose({1});
  const auto left = Reserve(0, {{1, 0, 16}, {1, 16, 16}});
  ASSERT_TRUE(left.ok()) << left.status();
  EXPECT_TRUE(left->entries[0].replay && !left->entries[0].brings_back);
  EXPECT_TRUE(!left->entries[1].replay && left->entries[1].brings_back);
  EXPECT_THAT(left->page_updates, ::testing::IsEmpty());
  table_.Commit(*left);
  const auto again = Reserve(0, {{1, 16, 16}});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->entries[0].replay);
  table_.Commit(*again);
}

TEST_F(BringingBackTest, ACallThatFailedHasBroughtNothing) {
  Add(1, 100);
  Lose({1});
  const auto failed = Reserve(0, {{1, 16, 16}});
  ASSERT_TRUE(failed.ok());
  table_.Rollback(*failed);
  EXPECT_THAT(Missing(1), ElementsAre(Range{16, 32}, Range{80, 96}));
  EXPECT_TRUE(Append(0, {{1, 16, 16}, {1, 80, 16}}).ok());
  EXPECT_TRUE(Look(1).ok());
}

TEST_F(BringingBackTest, NeighboursThatAreLostTogetherAreOneRange) {
  Add(1, 130);
  Lose({1, 2});
  EXPECT_THAT(Missing(1), ElementsAre(Range{16, 48}, Range{80, 112}));
  EXPECT_TRUE(Append(0, {{1, 16, 32}, {1, 80, 32}}).ok());
  EXPECT_TRUE(Look(1).ok());
  Lose({0, 3});
  // The last range of a page and the first of the next one touch.
  EXPECT_THAT(Missing(1), ElementsAre(Range{0, 16}, Range{48, 80}, Range{112, 130}));
  EXPECT_TRUE(Append(0, {{1, 0, 16}, {1, 48, 32}, {1, 112, 18}}).ok());
  EXPECT_TRUE(Look(1).ok());
}

TEST_F(BringingBackTest, ATruncationBeforeWhatIsMissingMendsIt) {
  Add(1, 200);
  Lose({2});
  ASSERT_TRUE(table_.Truncate(1, 100).ok());
  EXPECT_THAT(Missing(1), ElementsAre(Range{32, 48}, Range{96, 100}));
  ASSERT_TRUE(table_.Truncate(1, 32).ok());
  EXPECT_EQ(table_.lost(), 0);
  EXPECT_TRUE(Append(0, {{1, 32, 100}}).ok());
  EXPECT_TRUE(Look(1).ok());
}

TEST_F(BringingBackTest, ForksShareWhatIsLostAndWhatIsBrought) {
  Add(1, 100);
  ASSERT_TRUE(table_.Fork(1, 2, 90).ok());
  ASSERT_TRUE(Append(0, {{2, 90, 30}}).ok());  // a page of its own for what follows
  ASSERT_TRUE(table_.Fork(1, 3, 20).ok());
  Lose({1});
  EXPECT_EQ(table_.lost(), 3);
  EXPECT_THAT(Missing(3), ElementsAre(Range{16, 20}));
  EXPECT_THAT(Missing(2), ElementsAre(Range{16, 32}, Range{80, 96}));
  // A fork brings what it has, its parent the rest.
  EXPECT_TRUE(Append(0, {{3, 16, 4}}).ok());
  EXPECT_TRUE(Look(3).ok());
  EXPECT_THAT(Missing(1), ElementsAre(Range{20, 32}, Range{80, 96}));
  EXPECT_TRUE(Append(0, {{1, 20, 12}, {1, 80, 16}}).ok());
  EXPECT_TRUE(Look(1).ok());
  EXPECT_THAT(Missing(2), ElementsAre(Range{80, 96})) << "the shared page is whole";
  EXPECT_TRUE(Append(0, {{2, 80, 16}}).ok());
  EXPECT_TRUE(Look(2).ok());
  EXPECT_EQ(table_.lost(), 0);
}

TEST_F(BringingBackTest, AForkWithoutTokensThereIsNotLostAndGoesOn) {
  Add(1, 100);
  ASSERT_TRUE(table_.Fork(1, 2, 10).ok());
  Lose({1});
  EXPECT_FALSE(table_.Find(2)->lost);
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_TRUE(Append(0, {{2, 10, 50}}).ok());  // in the page that was shared
  Lose({3});
  EXPECT_THAT(Missing(2), ElementsAre(Range{48, 60})) << "what it wrote on rank 1 is there";
}

TEST_F(BringingBackTest, ALossBeforeAllIsBroughtAddsToWhatIsMissing) {
  Add(1, 130);
  Lose({1});
  EXPECT_TRUE(Append(0, {{1, 16, 16}}).ok());
  Lose({1});
  EXPECT_THAT(Missing(1), ElementsAre(Range{16, 32}, Range{80, 96})) << "what was brought is gone";
  Lose({3});
  EXPECT_THAT(Missing(1),
              ElementsAre(Range{16, 32}, Range{48, 64}, Range{80, 96}, Range{112, 128}));
  Lose({0, 2});
  EXPECT_TRUE(Missing(1).empty()) << "nothing is left";
  EXPECT_EQ(table_.pages().used(), 0);
  EXPECT_EQ(table_.lost(), 1);
  bool reopened = false;
  EXPECT_TRUE(table_.Open(1, &reopened).ok());
  EXPECT_EQ(table_.lost(), 0);
}

TEST_F(BringingBackTest, AWholeSequenceIsNotLostAgainWithOthers) {
  Add(1, 64);
  Lose({1});
  EXPECT_TRUE(Append(0, {{1, 16, 16}}).ok());
  Add(2, 64);
  Lose({});
  EXPECT_TRUE(Look(1).ok());
  EXPECT_TRUE(Look(2).ok());
}

TEST_F(BringingBackTest, OnlyLostSequencesHaveSeveralEntries) {
  Add(1, 100);
  const absl::Status twice = Append(0, {{1, 100, 4}, {1, 104, 4}});
  EXPECT_EQ(twice.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(twice), "entries[1].sequence_id");
  EXPECT_EQ(table_.Find(1)->lengths[0], 100);
}

TEST_F(BringingBackTest, StepsOfSessionsBringNothing) {
  Add(1, 100);
  Lose({1});
  RangeSteps steps(table_);
  const auto refused =
      steps.Accept({.first = 0, .count = 1}, worker::StepKind::kAppend,
                   {{.sequence = 1, .first_position = 16, .new_tokens = 16}}, {}, nullptr);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(MissingTokensOf(refused.status())->ranges, SizeIs(2));
}

TEST_F(BringingBackTest, ASessionsStepInFlightIsUndoneAndTheRestMended) {
  Add(1, 100);
  ASSERT_TRUE(table_.Fork(1, 2, 100).ok());
  RangeSteps steps(table_);
  auto accepted = steps.Accept(
      {.first = 0, .count = 1}, worker::StepKind::kDecode,
      {{.sequence = 2, .first_position = 100, .query_rows = 8, .new_tokens = 8}}, {}, nullptr);
  ASSERT_TRUE(accepted.ok()) << accepted.status();
  Lose({1});
  steps.Undo(&*accepted);
  EXPECT_EQ(table_.Find(2)->lengths[0], 100);
  EXPECT_THAT(Missing(2), ElementsAre(Range{16, 32}, Range{80, 96}));
  EXPECT_TRUE(Append(0, {{1, 16, 16}, {1, 80, 16}}).ok());
  EXPECT_TRUE(Look(2).ok()) << "the page that was put back is shared again";
  EXPECT_TRUE(Append(0, {{2, 100, 8}}).ok());
}

TEST_F(BringingBackTest, AChangeThatIsRefusedHalfWayLeavesItAsItWas) {
  Add(1, 100);
  Lose({1});
  HeldPages held;
  SavedSequences saved;
  table_.Save(1, &saved);
  table_.HoldReleased(&held);
  ASSERT_TRUE(table_.Truncate(1, 16).ok());
  EXPECT_EQ(table_.lost(), 0);
  table_.PutBack(saved);
  table_.HoldReleased(nullptr);
  table_.ReleaseHeld(&held);
  EXPECT_EQ(table_.lost(), 1);
  EXPECT_THAT(Missing(1), ElementsAre(Range{16, 32}, Range{80, 96}));
}

// Interleaved more finely than pages, and with more ranges than an error tells.
class FineTest : public BringingBackTest {
 protected:
  FineTest() : BringingBackTest(1, 1) {}
};

TEST_F(FineTest, AnErrorTellsTheFirstHundredRanges) {
  Add(1, 1000);
  Lose({3});
  const auto missing = MissingTokensOf(Look(1));
  ASSERT_THAT(missing->ranges, SizeIs(100));
  EXPECT_EQ(missing->ranges[0], (Range{3, 4}));
  EXPECT_EQ(missing->ranges[99], (Range{399, 400}));
  EXPECT_EQ(missing->tokens, 250);
  int calls = 0;
  while (true) {
    const auto left = MissingTokensOf(Look(1));
    if (!left.has_value()) break;
    std::vector<Tokens> all;
    for (const Range& range : left->ranges) {
      all.push_back({1, range.begin, static_cast<int32_t>(range.end - range.begin)});
    }
    ASSERT_TRUE(Append(0, all).ok());
    ++calls;
  }
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(Look(1).ok());
}

class LayersTest : public BringingBackTest {
 protected:
  LayersTest() : BringingBackTest(3) {}
};

TEST_F(LayersTest, EachLayerIsMendedByItself) {
  Add(1, 50);
  Lose({0});
  for (int32_t layer = 0; layer < 3; ++layer) {
    EXPECT_THAT(Missing(1, layer), ElementsAre(Range{0, 16}));
    ASSERT_TRUE(Append(layer, {{1, 0, 16}}).ok());
    if (layer == 2) break;
    // A layer that is whole names one that is not.
    const auto next = MissingTokensOf(Look(1, layer));
    ASSERT_TRUE(next.has_value());
    EXPECT_EQ(next->layer, layer + 1);
  }
  EXPECT_TRUE(Look(1, 0).ok());
  EXPECT_EQ(table_.lost(), 0);
}

// A layer with a window has pages of its own, of which old ones are given up.
TEST(BringingBackWindows, WhatWasGivenUpIsNotMissing) {
  SequenceTable table({.layers = 2,
                       .ranks = 4,
                       .page_size = 16,
                       .interleave = 16,
                       .pages = 32,
                       .max_sequences = 8,
                       .name = "c",
                       .window_left = {-1, 31},
                       .rollback_tokens = 16,
                       .window_pages = 8});
  bool reopened = false;
  ASSERT_TRUE(table.Open(1, &reopened).ok());
  const auto append = [&](int32_t layer, int64_t first, int32_t tokens) {
    const auto reserved =
        table.Reserve(layer, worker::StepKind::kAppend,
                      {{.sequence = 1, .first_position = first, .new_tokens = tokens}});
    if (reserved.ok()) table.Commit(*reserved);
    return reserved.status();
  };
  for (int64_t first = 0; first < 320; first += 64) {
    for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(append(layer, first, 64).ok());
  }
  table.MarkLostOn({false, true, false, false});
  const auto missing = [&](int32_t layer) {
    return MissingTokensOf(append(layer, 320, 1)).value_or(MissingTokens());
  };
  EXPECT_THAT(missing(0).ranges, SizeIs(5));
  const MissingTokens window = missing(1);
  EXPECT_EQ(window.layer, 1);
  ASSERT_THAT(window.ranges, SizeIs(::testing::Lt(5)));
  EXPECT_EQ(window.ranges.back(), (Range{272, 288}));
  for (const MissingTokens& lacks : {missing(0), window}) {
    for (const Range& range : lacks.ranges) {
      const auto count = static_cast<int32_t>(range.end - range.begin);
      EXPECT_TRUE(append(lacks.layer, range.begin, count).ok());
    }
  }
  EXPECT_TRUE(append(1, 320, 1).ok());
  EXPECT_TRUE(append(0, 320, 1).ok());
}

}  // namespace
}  // namespace tributary::service
