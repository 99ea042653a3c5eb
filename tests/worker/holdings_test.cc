// What a rank says that it holds: lengths from the steps it carried out, what it was told besides,
// and how to undo what its peers may not have done.
#include "worker/holdings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "base/status/errors.h"
#include "worker/page_tables.h"

namespace tributary::worker::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int32_t kLayers = 2;

class HoldingsTest : public ::testing::Test {
 protected:
  // One sequence appends `tokens` at `first`, and its table becomes longer by `pages`.
  void Step(uint64_t number, int32_t layer, int64_t first, int32_t tokens,
            const std::vector<PageUpdate>& updates = {}) {
    const CommandMark mark{1, number};
    records_.BeforeUpdates(mark, updates, tables_);
    for (const PageUpdate& update : updates) tables_.Update(update);
    StepCommand step;
    step.layer = layer;
    step.entries = {{.sequence = 7, .first_position = first, .new_tokens = tokens}};
    records_.AfterStep(mark, step);
  }
  HeldCache Report() const {
    HeldCache held;
    records_.Report(tables_, &held);
    return held;
  }

  PageTables tables_{16};
  SequenceRecords records_{kLayers};
};

TEST_F(HoldingsTest, LengthsFollowFromSteps) {
  Step(1, 0, 0, 10, {{7, 0, {3}}});
  Step(2, 1, 0, 10);
  Step(3, 0, 10, 2);
  const HeldCache held = Report();
  ASSERT_THAT(held.sequences, SizeIs(1));
  EXPECT_EQ(held.sequences[0].id, 7u);
  EXPECT_THAT(held.sequences[0].pages, ElementsAre(3));
  EXPECT_THAT(held.sequences[0].lengths, ElementsAre(12, 10));
  EXPECT_THAT(held.sequences[0].last_step, ElementsAre(10, 0));
}

TEST_F(HoldingsTest, ARepeatedStepAndADraftAddNothing) {
  Step(1, 0, 0, 10, {{7, 0, {3}}});
  StepCommand step;
  step.entries = {{.sequence = 7, .first_position = 2, .new_tokens = 3, .replay = true}};
  records_.AfterStep({1, 2}, step);
  step.kind = StepKind::kDflash;
  step.entries = {{.sequence = 7, .first_position = 10, .query_rows = 8, .new_tokens = 8}};
  records_.AfterStep({1, 3}, step);
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(10, 0));
}

// A call in several steps holds nothing before its last.
TEST_F(HoldingsTest, TokensOfALongCallCountWithItsLastStep) {
  Step(1, 0, 0, 10, {{7, 0, {3, 4}}});
  StepCommand step;
  step.entries = {{.sequence = 7, .first_position = 10, .new_tokens = 10, .more_follows = true}};
  records_.AfterStep({1, 2}, step);
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(10, 0));
  step.entries = {{.sequence = 7, .first_position = 20, .new_tokens = 5}};
  records_.AfterStep({1, 3}, step);
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(25, 0));
  EXPECT_THAT(Report().sequences[0].last_step, ElementsAre(10, 0)) << "where the call began";
  EXPECT_EQ(Report().undo.back().length, 10);
}

// The layer is as long as before.
TEST_F(HoldingsTest, TokensThatAreBroughtBackChangeNoLength) {
  Step(1, 0, 0, 100, {{7, 0, {3, 4}}});
  StepCommand step;
  step.entries = {{.sequence = 7, .first_position = 16, .new_tokens = 16, .brings_back = true}};
  records_.AfterStep({1, 2}, step);
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(100, 0));
}

TEST_F(HoldingsTest, WhatAllRanksHaveDoneIsNotUndone) {
  Step(1, 0, 0, 10, {{7, 0, {3}}});
  Step(2, 0, 10, 10, {{7, 0, {5}}, {7, 1, {4}}});
  EXPECT_THAT(Report().undo, SizeIs(5));
  records_.SettleUpTo({1, 1});
  const HeldCache held = Report();
  ASSERT_THAT(held.undo, SizeIs(3));
  EXPECT_THAT(held.undo[0].pages, ElementsAre(3)) << "what stood where the copy is now";
  EXPECT_EQ(held.undo[1].table_size, 1);
  EXPECT_THAT(held.undo[1].pages, IsEmpty());
  EXPECT_EQ(held.undo[2].length, 10);
  records_.SettleUpTo({1, 2});
  EXPECT_THAT(Report().undo, IsEmpty());
}

TEST_F(HoldingsTest, StandingsSetLengthsAndWhatWasGivenUpStaysSo) {
  Step(1, 0, 0, 10, {{7, 0, {3, 4}}});
  Step(2, 1, 0, 10);
  records_.Tell({{.sequence = 7, .given_up = 1, .lengths = {}}});
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(10, 10));
  records_.Tell({{.sequence = 7, .given_up = 0, .lengths = {6, 4}}});
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(6, 4));
  EXPECT_EQ(Report().sequences[0].given_up, 1) << "an older word of it came later";
  records_.Tell({{.sequence = 7, .given_up = 0, .lengths = {0}}});
  EXPECT_THAT(Report().sequences[0].lengths, ElementsAre(0, 0)) << "one length for all layers";
  EXPECT_EQ(Report().sequences[0].given_up, 0);
}

TEST_F(HoldingsTest, ADroppedSequenceLeavesNothing) {
  Step(1, 0, 0, 10, {{7, 0, {3}}});
  tables_.Drop(7);
  records_.Drop(7);
  EXPECT_THAT(Report().sequences, IsEmpty());
  EXPECT_THAT(Report().undo, IsEmpty());
}

TEST_F(HoldingsTest, StandingsThatCannotBeAreRefused) {
  const auto field = [this](const Standing& standing) {
    return FieldOf(records_.Check({standing}, "standings"));
  };
  EXPECT_EQ(field({.sequence = 7, .given_up = -1, .lengths = {}}), "standings[0].given_up");
  EXPECT_EQ(field({.sequence = 7, .given_up = 0, .lengths = {1, 2, 3}}), "standings[0].lengths");
  EXPECT_EQ(field({.sequence = 7, .given_up = 0, .lengths = {1, 2}}), "");
}

}  // namespace
}  // namespace tributary::worker::testing
