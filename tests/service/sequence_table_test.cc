#include "service/schedule/sequence_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/status/errors.h"

namespace tributary::service {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kPageTokens = 64;  // page_size * ranks

TableGeometry SmallGeometry() {
  return {.layers = 2,
          .ranks = 4,
          .page_size = 16,
          .interleave = 8,
          .pages = 8,
          .max_sequences = 4,
          .name = "c"};
}

const std::vector<int32_t>& Pages(const Sequence& sequence, int32_t group = 0) {
  return sequence.groups[group].pages;
}

class SequenceTableTest : public ::testing::Test {
 protected:
  explicit SequenceTableTest(const TableGeometry& geometry = SmallGeometry()) : table_(geometry) {}

  SequenceId MustOpen(SequenceId id) {
    bool reopened = false;
    const auto opened = table_.Open(id, &reopened);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return *opened;
  }
  absl::StatusOr<StepReservation> Plan(SequenceId id, int64_t first, int32_t tokens,
                                       int32_t layer = 0) {
    return table_.Reserve(
        layer, worker::StepKind::kDecode,
        {{.sequence = id, .first_position = first, .query_rows = tokens, .new_tokens = tokens}});
  }
  void MustAppend(SequenceId id, int64_t first, int32_t tokens, int32_t layer = 0) {
    const auto plan = Plan(id, first, tokens, layer);
    ASSERT_TRUE(plan.ok()) << plan.status();
    table_.Commit(*plan);
  }
  void MustAppendAll(SequenceId id, int64_t first, int32_t tokens) {
    for (int32_t layer = 0; layer < 2; ++layer) MustAppend(id, first, tokens, layer);
  }

  SequenceTable table_;
};

TEST_F(SequenceTableTest, PagesAreTakenOnceForAllLayersAndOnlyTheNewOnesAreTold) {
  MustOpen(1);
  const auto first = Plan(1, 0, 65);
  ASSERT_TRUE(first.ok());
  ASSERT_THAT(first->page_updates, SizeIs(1));
  EXPECT_EQ(first->page_updates[0].first_index, 0);
  EXPECT_THAT(first->page_updates[0].pages, SizeIs(2));
  EXPECT_FALSE(first->entries[0].replay);
  table_.Commit(*first);
  EXPECT_EQ(table_.pages().used(), 2);

  const auto other_layer = Plan(1, 0, 65, 1);
  ASSERT_TRUE(other_layer.ok());
  EXPECT_THAT(other_layer->page_updates, IsEmpty());
  table_.Commit(*other_layer);
  EXPECT_EQ(LeastLength(*table_.Find(1)), 65);

  const auto next = Plan(1, 65, 64);
  ASSERT_THAT(next->page_updates, SizeIs(1));
  EXPECT_EQ(next->page_updates[0].first_index, 2);
  EXPECT_THAT(next->page_updates[0].pages, SizeIs(1));
}

TEST_F(SequenceTableTest, ARolledBackStepLeavesNothing) {
  MustOpen(1);
  MustAppend(1, 0, 10);
  const auto plan = Plan(1, 10, 100);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(table_.pages().used(), 2);
  table_.Rollback(*plan);
  EXPECT_EQ(table_.pages().used(), 1);
  EXPECT_EQ(table_.Find(1)->lengths[0], 10);
}

TEST_F(SequenceTableTest, PositionsDecideBetweenAppendRepeatGapAndOverlap) {
  MustOpen(1);
  MustAppend(1, 0, 10);
  EXPECT_TRUE(Plan(1, 0, 10)->entries[0].replay);
  EXPECT_TRUE(Plan(1, 3, 2)->entries[0].replay);
  const auto gap = Plan(1, 11, 1);
  EXPECT_EQ(gap.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(gap.status()), "entries[0].first_position");
  EXPECT_THAT(std::string(gap.status().message()), ::testing::HasSubstr("10"));
  EXPECT_EQ(Plan(1, INT64_MAX, 1).status().code(), absl::StatusCode::kOutOfRange);
  const auto overlap = Plan(1, 9, 2);
  EXPECT_EQ(overlap.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(overlap.status()), "entries[0].first_position");
  // The other layer is empty.
  EXPECT_EQ(Plan(1, 1, 1, 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(table_
                .Reserve(0, worker::StepKind::kDecode,
                         {{.sequence = 1, .first_position = 9, .query_rows = 2}})
                .status()
                .code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(table_
                  .Reserve(0, worker::StepKind::kDecode,
                           {{.sequence = 1, .first_position = 9, .query_rows = 1}})
                  .ok());
}

TEST_F(SequenceTableTest, APlanOfSeveralEntriesIsAllOrNothing) {
  MustOpen(1);
  MustOpen(2);
  const auto plan =
      table_.Reserve(0, worker::StepKind::kDecode,
                     {{.sequence = 1, .first_position = 0, .query_rows = 300, .new_tokens = 300},
                      {.sequence = 2, .first_position = 0, .query_rows = 300, .new_tokens = 300}});
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(table_.pages().used(), 0);
  const auto unknown =
      table_.Reserve(0, worker::StepKind::kDecode,
                     {{.sequence = 1, .first_position = 0, .query_rows = 1, .new_tokens = 1},
                      {.sequence = 9, .first_position = 0, .query_rows = 1, .new_tokens = 1}});
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FieldOf(unknown.status()), "entries[1].sequence_id");
  EXPECT_EQ(table_.pages().used(), 0);
}

TEST_F(SequenceTableTest, AForkSharesPagesUntilOneOfTheTwoWrites) {
  MustOpen(1);
  MustAppendAll(1, 0, 100);  // two pages, the second partly filled
  const auto child = table_.Fork(1, 2, -1);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(Pages(**child), Pages(*table_.Find(1)));
  EXPECT_EQ(table_.pages().used(), 2);
  EXPECT_EQ(table_.pages().shared(), 2);

  const std::vector<int32_t> parent_pages = Pages(*table_.Find(1));
  const auto plan = Plan(2, 100, 1);
  ASSERT_TRUE(plan.ok());
  ASSERT_THAT(plan->page_copies, SizeIs(1));
  EXPECT_EQ(plan->page_copies[0].source, parent_pages[1]);
  ASSERT_THAT(plan->page_updates, SizeIs(1));
  EXPECT_EQ(plan->page_updates[0].sequence, 2u);
  EXPECT_EQ(plan->page_updates[0].first_index, 1);
  EXPECT_THAT(plan->page_updates[0].pages, ElementsAre(plan->page_copies[0].destination));
  table_.Commit(*plan);
  EXPECT_EQ(table_.pages().used(), 3);
  EXPECT_EQ(table_.pages().shared(), 1);
  // The parent is alone with its page again and writes in place.
  EXPECT_THAT(Plan(1, 100, 1)->page_copies, IsEmpty());
  EXPECT_EQ(Pages(*table_.Find(1)), parent_pages);
}

TEST_F(SequenceTableTest, ParentAndChildMayCopyTheSamePageAtOnce) {
  MustOpen(1);
  MustAppendAll(1, 0, 10);
  ASSERT_TRUE(table_.Fork(1, 2, -1).ok());
  const auto plan =
      table_.Reserve(0, worker::StepKind::kDecode,
                     {{.sequence = 1, .first_position = 10, .query_rows = 1, .new_tokens = 1},
                      {.sequence = 2, .first_position = 10, .query_rows = 1, .new_tokens = 1}});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->page_copies, SizeIs(2));
  EXPECT_NE(plan->page_copies[0].destination, plan->page_copies[1].destination);
  table_.Commit(*plan);
  EXPECT_EQ(table_.pages().used(), 2) << "the page nobody holds any more is free";
  EXPECT_EQ(table_.pages().shared(), 0);
}

TEST_F(SequenceTableTest, AfterARolledBackCopyTheWorkersAreToldAgain) {
  MustOpen(1);
  MustAppendAll(1, 0, 10);
  const int32_t page = Pages(*table_.Find(1))[0];
  ASSERT_TRUE(table_.Fork(1, 2, -1).ok());
  table_.Rollback(*Plan(2, 10, 1));
  EXPECT_EQ(table_.pages().used(), 1);
  // A query reads the page the workers may have lost sight of.
  const auto query = table_.Reserve(0, worker::StepKind::kDecode,
                                    {{.sequence = 2, .first_position = 0, .query_rows = 1}});
  ASSERT_TRUE(query.ok());
  ASSERT_THAT(query->page_updates, SizeIs(1));
  EXPECT_EQ(query->page_updates[0].first_index, 0);
  EXPECT_THAT(query->page_updates[0].pages, ElementsAre(page));
  table_.Commit(*query);
  EXPECT_THAT(table_
                  .Reserve(0, worker::StepKind::kDecode,
                           {{.sequence = 2, .first_position = 0, .query_rows = 1}})
                  ->page_updates,
              IsEmpty());
}

TEST_F(SequenceTableTest, AForkMayBeRepeatedWhileTheChildIsUntouched) {
  MustOpen(1);
  MustAppendAll(1, 0, 10);
  EXPECT_EQ((*table_.Fork(1, 2, 5))->id, 2u);
  EXPECT_EQ((*table_.Fork(1, 2, 5))->id, 2u);
  EXPECT_EQ(table_.Fork(1, 2, 6).status().code(), absl::StatusCode::kAlreadyExists);
  MustAppend(2, 5, 1);
  EXPECT_EQ(table_.Fork(1, 2, 5).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(table_.Fork(1, 1, 5).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(table_.Fork(1, 3, 11).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(table_.Fork(7, 3, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SequenceTableTest, AForkIsNotRepeatedOnceTheTokensAreOthers) {
  const auto again = [&](SequenceId child) { return table_.Fork(1, child, 7).status().code(); };
  MustOpen(1);
  MustAppendAll(1, 0, 13);
  ASSERT_TRUE(table_.Fork(1, 2, 7).ok());
  // Beyond what they share anything may happen.
  ASSERT_TRUE(table_.Truncate(1, 7).ok());
  MustAppendAll(1, 7, 2);
  EXPECT_EQ(again(2), absl::StatusCode::kOk);
  // The parent's tokens are others.
  ASSERT_TRUE(table_.Truncate(1, 3).ok());
  MustAppendAll(1, 3, 8);
  EXPECT_EQ(again(2), absl::StatusCode::kAlreadyExists);
  // The child's are.
  ASSERT_TRUE(table_.Fork(1, 3, 7).ok());
  ASSERT_TRUE(table_.Truncate(3, 3).ok());
  MustAppendAll(3, 3, 4);
  EXPECT_EQ(again(3), absl::StatusCode::kAlreadyExists);
  // Another sequence has the parent's id.
  ASSERT_TRUE(table_.Fork(1, 4, 7).ok());
  ASSERT_TRUE(table_.Close(1).ok());
  MustOpen(1);
  MustAppendAll(1, 0, 9);
  EXPECT_EQ(again(4), absl::StatusCode::kAlreadyExists);
}

// As a coordinator that has restarted knows them: by what they hold.
TEST_F(SequenceTableTest, AForkMayBeRepeatedThatWasAdopted) {
  MustOpen(1);
  MustAppendAll(1, 0, 100);
  for (const SequenceId id : {2, 3}) {
    Sequence adopted = **table_.Fork(1, id + 10, 70);
    ASSERT_TRUE(table_.Close(id + 10).ok());
    adopted.id = id;
    adopted.parent = 0;
    adopted.fork_length = 0;
    table_.Restore(std::move(adopted));
  }
  table_.FinishRestoring();
  EXPECT_EQ((*table_.Fork(1, 2, 70))->fork_length, 70);
  EXPECT_EQ((*table_.Fork(1, 2, 70))->id, 2u);
  EXPECT_EQ(table_.Fork(1, 2, 69).status().code(), absl::StatusCode::kAlreadyExists);
  MustAppend(3, 70, 1);
  EXPECT_EQ(table_.Fork(1, 3, 70).status().code(), absl::StatusCode::kAlreadyExists);
  MustOpen(4);
  EXPECT_EQ(table_.Fork(1, 4, 0).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(SequenceTableTest, TruncateReturnsPagesBeyondTheLongestLayer) {
  MustOpen(1);
  MustAppend(1, 0, 200, 0);
  MustAppend(1, 0, 100, 1);
  EXPECT_EQ(*table_.Truncate(1, 150), 100);
  EXPECT_EQ(table_.Find(1)->lengths[0], 150);
  EXPECT_EQ(table_.pages().used(), 3);
  EXPECT_EQ(*table_.Truncate(1, 64), 64);
  EXPECT_EQ(table_.pages().used(), 1);
  EXPECT_EQ(*table_.Truncate(1, 1000), 64);
  EXPECT_EQ(*table_.Truncate(1, 0), 0);
  EXPECT_EQ(table_.pages().used(), 0);
}

TEST_F(SequenceTableTest, TruncatingAForkKeepsTheOthersPages) {
  MustOpen(1);
  MustAppendAll(1, 0, 128);
  ASSERT_TRUE(table_.Fork(1, 2, -1).ok());
  EXPECT_EQ(*table_.Truncate(2, 10), 10);
  EXPECT_EQ(table_.pages().used(), 2);
  EXPECT_EQ(table_.pages().shared(), 1);
  // Rewriting the kept part's page copies it: the parent still needs what lies beyond 10.
  EXPECT_THAT(Plan(2, 10, 1)->page_copies, SizeIs(1));
}

TEST_F(SequenceTableTest, OpenIsRepeatableWhileEmptyAndLimited) {
  MustOpen(1);
  MustOpen(1);
  MustAppend(1, 0, 1);
  bool reopened = false;
  EXPECT_EQ(table_.Open(1, &reopened).status().code(), absl::StatusCode::kAlreadyExists);
  for (int i = 0; i < 3; ++i) EXPECT_NE(MustOpen(0), 0u);
  EXPECT_EQ(table_.Open(0, &reopened).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(SequenceTableTest, ASequenceIsLostIffAFreshRankHeldAnyOfIt) {
  MustOpen(1);  // 8 tokens: all on rank 0
  MustAppend(1, 0, 8);
  MustOpen(2);  // 9: ranks 0 and 1
  MustAppend(2, 0, 9, 1);
  MustOpen(3);  // none
  table_.MarkLostOn({false, true, false, false});
  EXPECT_FALSE(table_.Find(1)->lost);
  EXPECT_TRUE(table_.Find(2)->lost);
  EXPECT_FALSE(table_.Find(3)->lost);
  EXPECT_EQ(table_.lost(), 1);
  EXPECT_EQ(table_.pages().used(), 2);
  EXPECT_EQ(Plan(2, 0, 1).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(table_.Fork(2, 4, 0).status().code(), absl::StatusCode::kDataLoss);
  MustOpen(2);
  EXPECT_EQ(table_.pages().used(), 1);
  EXPECT_EQ(table_.lost(), 0);
  MustAppend(2, 0, 1);
  table_.MarkLostOn({true, false, false, false});
  EXPECT_EQ(table_.lost(), 2);
  EXPECT_EQ(table_.pages().used(), 0) << "nothing is left of them";
  EXPECT_EQ(table_.Truncate(2, 0).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(table_.lost(), 1);
}

TEST_F(SequenceTableTest, SnapshotTellsEveryTableAndSettlesWhatWasOutOfStep) {
  MustOpen(1);
  MustAppendAll(1, 0, 70);
  MustOpen(2);
  ASSERT_TRUE(table_.Fork(1, 3, -1).ok());
  table_.Rollback(*Plan(3, 70, 1));
  const auto tables = table_.Snapshot();
  EXPECT_THAT(tables, SizeIs(3));
  for (const auto& told : tables) {
    // Sequence 2 holds no pages.
    EXPECT_EQ(told.table.has_value(), told.standing.sequence != 2);
    if (told.table.has_value()) {
      EXPECT_EQ(told.table->pages, Pages(*table_.Find(1)));
    }
  }
  EXPECT_THAT(Plan(3, 0, 1)->page_updates, IsEmpty());
}

// ------------------------------------------------------------------------------------ drafts

TEST_F(SequenceTableTest, ADraftTakesNoPagesAndLeavesTheLengthAsItIs) {
  MustOpen(1);
  MustAppend(1, 0, 10);
  const auto draft = [&](int64_t first) {
    return table_.Reserve(
        0, worker::StepKind::kDflash,
        {{.sequence = 1, .first_position = first, .query_rows = 200, .new_tokens = 200}});
  };
  for (const int64_t first : {10, 10, 3, 0}) {
    const auto plan = draft(first);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(plan->page_updates, IsEmpty());
    EXPECT_FALSE(plan->entries[0].replay);
    EXPECT_EQ(plan->entries[0].new_tokens, 200);
    EXPECT_EQ(plan->changes[0].length, 10);
    table_.Commit(*plan);
    EXPECT_EQ(table_.Find(1)->lengths[0], 10);
    EXPECT_EQ(table_.pages().used(), 1);
  }
  const auto gap = draft(11);
  EXPECT_EQ(gap.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(gap.status()), "entries[0].first_position");
}

// ------------------------------------------------------------------- tokens that no window reaches

class WindowedTableTest : public SequenceTableTest {
 protected:
  // Rows of layer 0 look 100 tokens back, those of layer 1 only 10. A page is 64 tokens.
  WindowedTableTest() : SequenceTableTest(Geometry()) {}

  static TableGeometry Geometry() {
    TableGeometry geometry = SmallGeometry();
    geometry.window_left = {100, 10};
    geometry.rollback_tokens = 20;
    return geometry;
  }
  int64_t HeldFrom(SequenceId id) { return table_.HeldFrom(*table_.Find(id)); }
  absl::StatusOr<StepReservation> Rows(SequenceId id, int64_t first, int32_t layer = 0) {
    return table_.Reserve(layer, worker::StepKind::kDecode,
                          {{.sequence = id, .first_position = first, .query_rows = 1}});
  }
};

TEST_F(WindowedTableTest, ASequenceMayBeLongerThanTheCache) {
  MustOpen(1);
  for (int64_t length = 0; length < 4000; length += 40) {
    MustAppendAll(1, length, 40);
    // A row 20 tokens back sees all of its window, and little else is held.
    EXPECT_LE(HeldFrom(1), std::max<int64_t>(0, length + 40 - 120));
    EXPECT_LE(table_.pages().used(), 4);
  }
  const Sequence& sequence = *table_.Find(1);
  EXPECT_EQ(Pages(sequence).size(), 63u);
  EXPECT_EQ(sequence.groups[0].given_up, 60);
  EXPECT_EQ(table_.given_up(), 60);
  EXPECT_EQ(table_.pages().used(), 3);
  EXPECT_EQ(Pages(sequence)[59], kNoPage);
  int64_t held = 0;
  for (int rank = 0; rank < 4; ++rank) held += table_.LocalTokens(rank, sequence, 4000);
  EXPECT_EQ(held, 4000 - HeldFrom(1));
  EXPECT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(table_.pages().used(), 0);
}

TEST_F(WindowedTableTest, TheLayerThatLagsBehindKeepsItsTokens) {
  MustOpen(1);
  MustAppend(1, 0, 300, 0);
  EXPECT_EQ(HeldFrom(1), 0);
  MustAppend(1, 0, 300, 1);
  EXPECT_EQ(HeldFrom(1), 0) << "the one step of each layer may be repeated";
  MustAppend(1, 300, 1, 0);
  EXPECT_EQ(HeldFrom(1), 0);
  MustAppend(1, 300, 1, 1);
  EXPECT_EQ(HeldFrom(1), 128) << "301 - 20 - 100, in whole pages";
}

TEST_F(WindowedTableTest, EveryLayerMayGoBackBehindTheEndOfTheShortest) {
  MustOpen(1);
  for (int64_t length = 0; length < 200; length += 20) MustAppendAll(1, length, 20);
  MustAppend(1, 200, 100, 0);  // layer 0, of the wide window, is far ahead
  MustAppend(1, 300, 1, 0);
  EXPECT_EQ(*table_.Truncate(1, 180), 180);
  MustAppendAll(1, 180, 1);
}

TEST_F(WindowedTableTest, TheLastStepOfALayerMayBeRepeatedHoweverLongItIs) {
  MustOpen(1);
  MustAppendAll(1, 0, 100);
  MustAppendAll(1, 100, 300);
  const auto again = Plan(1, 100, 300);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->entries[0].replay);
}

TEST_F(WindowedTableTest, RowsThatWouldSeeGivenUpTokensAreRefused) {
  MustOpen(1);
  MustAppendAll(1, 0, 300);
  MustAppendAll(1, 300, 1);
  ASSERT_EQ(HeldFrom(1), 128);
  // 301 - 20 is the first position possible, and 100 before that the first token.
  EXPECT_TRUE(Rows(1, 281).ok());
  const auto refused = Rows(1, 280);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(refused.status()), "entries[0].first_position");
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("281"));
  EXPECT_TRUE(Rows(1, 191, 1).ok()) << "the other layer's window is smaller";
  EXPECT_FALSE(Rows(1, 190, 1).ok());
}

TEST_F(WindowedTableTest, ARefusedRowIsToldWhereTheLastCallBegan) {
  MustOpen(1);
  MustAppendAll(1, 0, 100);
  MustAppendAll(1, 100, 300);
  EXPECT_THAT(std::string(Rows(1, 50).status().message()), HasSubstr("100 is the first"));
  EXPECT_TRUE(Rows(1, 100).ok());
}

TEST(WindowsTest, ARefusedCutIsToldWhatEveryLayerCanDo) {
  TableGeometry geometry = SmallGeometry();
  geometry.window_left = {10, 100};
  geometry.rollback_tokens = 20;
  SequenceTable table(geometry);
  bool reopened = false;
  ASSERT_TRUE(table.Open(1, &reopened).ok());
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (const auto& [first, tokens] : {std::pair(0, 300), std::pair(300, 1)}) {
      const auto plan = table.Reserve(
          layer, worker::StepKind::kDecode,
          {{.sequence = 1, .first_position = first, .query_rows = tokens, .new_tokens = tokens}});
      ASSERT_TRUE(plan.ok()) << plan.status();
      table.Commit(*plan);
    }
  }
  EXPECT_THAT(std::string(table.Truncate(1, 100).status().message()), HasSubstr("281"));
  EXPECT_TRUE(table.Truncate(1, 281).ok());
}

TEST_F(WindowedTableTest, WhatASequenceHeldBeforeItWasCutToNothingCountsNoMore) {
  MustOpen(1);
  MustAppendAll(1, 0, 300);
  MustAppendAll(1, 300, 1);
  ASSERT_TRUE(table_.Truncate(1, 0).ok());
  MustAppendAll(1, 0, 17);
  EXPECT_TRUE(Rows(1, 2).ok());
  EXPECT_TRUE(table_.Fork(1, 2, 3).ok());
  EXPECT_EQ(*table_.Truncate(1, 5), 5);
}

// Neither the sizes of calls nor those of pages decide how far back a sequence may go.
TEST_F(WindowedTableTest, HowFarBackDoesNotDependOnHowTheTokensCame) {
  SequenceId id = 0;
  for (const int32_t chunk : {301, 300, 150, 64, 63, 7, 1}) {
    MustOpen(++id);
    for (int32_t length = 0; length < 301; length += chunk) {
      MustAppendAll(id, length, std::min(chunk, 301 - length));
    }
    EXPECT_FALSE(table_.Fork(id, 100, 280).ok()) << chunk;
    EXPECT_FALSE(table_.Truncate(id, 280).ok()) << chunk;
    ASSERT_TRUE(table_.Truncate(id, 290).ok()) << chunk;
    EXPECT_FALSE(table_.Truncate(id, 280).ok()) << "from the longest that it was, chunk " << chunk;
    EXPECT_TRUE(table_.Truncate(id, 281).ok()) << chunk;
    MustAppendAll(id, 281, 1);
    EXPECT_FALSE(table_.Truncate(id, 280).ok()) << chunk;
    ASSERT_TRUE(table_.Close(id).ok());
  }
  // What no window has left behind is held, however far back it is.
  MustOpen(50);
  MustAppendAll(50, 0, 120);
  EXPECT_TRUE(table_.Truncate(50, 3).ok());
}

TEST_F(WindowedTableTest, TruncatingGoesAsFarBackAsTheNextRowSeesItsWindow) {
  MustOpen(1);
  MustAppendAll(1, 0, 300);
  MustAppendAll(1, 300, 1);
  const auto refused = table_.Truncate(1, 280);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(FieldOf(refused.status()), "length");
  EXPECT_EQ(LeastLength(*table_.Find(1)), 301);
  EXPECT_EQ(*table_.Truncate(1, 281), 281);
  EXPECT_EQ(*table_.Truncate(1, 281), 281);
  EXPECT_EQ(table_.pages().used(), 3);
  MustAppendAll(1, 281, 5);
  EXPECT_EQ(*table_.Truncate(1, 1000), 286);
  EXPECT_EQ(*table_.Truncate(1, 0), 0);
  EXPECT_EQ(HeldFrom(1), 0);
  EXPECT_EQ(table_.pages().used(), 0);
  MustAppendAll(1, 0, 70);
  EXPECT_EQ(table_.pages().used(), 2);
}

TEST_F(WindowedTableTest, AForkHoldsWhatItsParentHolds) {
  MustOpen(1);
  MustAppendAll(1, 0, 300);
  MustAppendAll(1, 300, 1);
  EXPECT_EQ(table_.Fork(1, 2, 280).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(table_.Fork(1, 2, 0).ok());
  const auto child = table_.Fork(1, 3, -1);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(HeldFrom(3), 128);
  EXPECT_EQ(table_.pages().shared(), 3);
  // The parent goes on; the child keeps what it needs.
  for (int64_t length = 301; length < 421; length += 20) MustAppendAll(1, length, 20);
  EXPECT_GT(HeldFrom(1), 128);
  EXPECT_EQ(HeldFrom(3), 128);
  EXPECT_TRUE(Rows(3, 281).ok());
  EXPECT_TRUE(table_.Close(1).ok());
  EXPECT_TRUE(table_.Close(3).ok());
  EXPECT_EQ(table_.pages().used(), 0);
}

TEST_F(WindowedTableTest, ARankThatHeldOnlyGivenUpTokensMayGo) {
  MustOpen(1);
  MustAppendAll(1, 0, 300);
  MustAppendAll(1, 300, 1);
  const auto tables = table_.Snapshot();
  ASSERT_THAT(tables, SizeIs(1));
  EXPECT_EQ(tables[0].table->first_index, 0);
  EXPECT_THAT(tables[0].table->pages, SizeIs(5));
  EXPECT_EQ(tables[0].table->pages[1], 0) << "a page that exists, whosever it is";
  EXPECT_EQ(tables[0].table->pages[2], Pages(*table_.Find(1))[2]);
  table_.MarkLostOn({false, false, false, true});
  EXPECT_TRUE(table_.Find(1)->lost) << "tokens from 128 on lie on every rank";
}

// Layer 0 sees everything and has 8 pages; layer 1 looks 10 tokens back and has 4 of its own.
class MixedTableTest : public SequenceTableTest {
 protected:
  MixedTableTest() : SequenceTableTest(Geometry()) {}

  static TableGeometry Geometry() {
    TableGeometry geometry = SmallGeometry();
    geometry.window_left = {-1, 10};
    geometry.rollback_tokens = 20;
    geometry.window_pages = 4;
    return geometry;
  }
};

TEST_F(MixedTableTest, OnlyTheLayerWithAWindowGivesPagesUp) {
  MustOpen(1);
  for (int64_t length = 0; length < 480; length += 40) MustAppendAll(1, length, 40);
  const Sequence& sequence = *table_.Find(1);
  EXPECT_THAT(Pages(sequence, 0), SizeIs(8));
  EXPECT_EQ(sequence.groups[0].given_up, 0);
  EXPECT_EQ(table_.pages(0).used(), 8);
  // Rows may begin at 440, where the last step did, and see tokens from 430 on.
  EXPECT_EQ(sequence.groups[1].given_up, 6);
  EXPECT_EQ(table_.pages(1).used(), 2);
  EXPECT_EQ(table_.HeldFrom(sequence), 384);
  int64_t held = 0;
  for (int rank = 0; rank < 4; ++rank) held += table_.LocalTokens(rank, sequence, 480);
  EXPECT_EQ(held, 480) << "layer 0 holds them all";
  EXPECT_THAT(table_.Snapshot(0)[0].table->pages, SizeIs(8));
  EXPECT_THAT(table_.Snapshot(1)[0].table->pages, SizeIs(8))
      << "entries of pages given up included";

  // The layer that sees everything still takes rows anywhere; the sequence is cut as a whole.
  const auto rows = [&](int32_t layer, int64_t first) {
    return table_
        .Reserve(layer, worker::StepKind::kDecode,
                 {{.sequence = 1, .first_position = first, .query_rows = 1}})
        .status()
        .code();
  };
  EXPECT_EQ(rows(0, 3), absl::StatusCode::kOk);
  EXPECT_EQ(rows(1, 440), absl::StatusCode::kOk) << "the last call may be repeated";
  EXPECT_EQ(rows(1, 439), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(table_.Truncate(1, 459).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(*table_.Truncate(1, 460), 460);
  EXPECT_EQ(table_.pages(0).used(), 8);
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(table_.pages(0).used(), 0);
  EXPECT_EQ(table_.pages(1).used(), 0);
}

TEST_F(MixedTableTest, EitherKindOfPageMayRunOut) {
  MustOpen(1);
  const auto window = Plan(1, 0, 257, 1);
  EXPECT_EQ(window.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(window.status().message()), HasSubstr("window pages of cache c"));
  MustAppend(1, 0, 256, 1);
  MustAppend(1, 0, 512, 0);
  const auto other = Plan(1, 512, 1, 0);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("pages of cache c: 1 needed"));
  EXPECT_EQ(table_.pages(0).used(), 8);
  EXPECT_EQ(table_.pages(1).used(), 4);
}

TEST_F(MixedTableTest, AForkSharesThePagesOfBothKinds) {
  MustOpen(1);
  for (int64_t length = 0; length < 240; length += 40) MustAppendAll(1, length, 40);
  ASSERT_TRUE(table_.Fork(1, 2, 230).ok());
  const int32_t full = table_.pages(0).used();
  const int32_t windowed = table_.pages(1).used();
  EXPECT_EQ(table_.pages(0).shared(), full);
  EXPECT_EQ(table_.pages(1).shared(), windowed);
  const auto plan = Plan(2, 230, 1, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->group, 1);
  ASSERT_THAT(plan->page_copies, SizeIs(1));
  EXPECT_EQ(plan->page_copies[0].source, Pages(*table_.Find(1), 1)[3]);
  table_.Rollback(*plan);
  EXPECT_THAT(table_.Find(2)->groups[1].unsynced, ElementsAre(3));
  EXPECT_THAT(table_.Find(2)->groups[0].unsynced, IsEmpty());
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(table_.pages(0).used(), full);
  EXPECT_EQ(table_.pages(1).used(), windowed);
}

// Against a model that is nothing but a count of tokens: pages in use are always exactly what the
// sequences hold, whatever happened.
void PagesNeverLeak(const std::vector<int64_t>& window_left, int32_t window_pages = 0) {
  std::mt19937 random(7);
  SequenceTable table({.layers = 2,
                       .ranks = 2,
                       .page_size = 16,
                       .interleave = 16,
                       .pages = 40,
                       .max_sequences = 100,
                       .window_left = window_left,
                       .rollback_tokens = 30,
                       .window_pages = window_pages});
  std::vector<SequenceId> open;
  const auto pick = [&] { return open[random() % open.size()]; };
  bool reopened = false;
  for (int i = 0; i < 20'000; ++i) {
    const int what = static_cast<int>(random() % 10);
    if (open.empty() || (what == 0 && open.size() < 12)) {
      open.push_back(*table.Open(0, &reopened));
    } else if (what == 1 && open.size() < 12) {
      if (auto child = table.Fork(pick(), 0, -1); child.ok()) open.push_back((*child)->id);
    } else if (what == 2) {
      const auto held = table.Truncate(pick(), random() % 200);
      ASSERT_TRUE(held.ok() || !window_left.empty()) << held.status();
    } else if (what == 3) {
      const size_t index = random() % open.size();
      ASSERT_TRUE(table.Close(open[index]).ok());
      open.erase(open.begin() + index);
    } else {
      const SequenceId id = pick();
      const int32_t layer = random() % 2;
      const int32_t tokens = 1 + random() % 60;
      auto plan = table.Reserve(layer, worker::StepKind::kDecode,
                                {{.sequence = id,
                                  .first_position = table.Find(id)->lengths[layer],
                                  .query_rows = tokens,
                                  .new_tokens = tokens}});
      if (!plan.ok()) {
        ASSERT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
      } else if (random() % 4 == 0) {
        table.Rollback(*plan);
      } else {
        table.Commit(*plan);
      }
    }
    for (int32_t group = 0; group < table.groups().size(); ++group) {
      std::map<int32_t, int> holders;
      for (const SequenceId id : open) {
        const Sequence& s = *table.Find(id);
        int64_t longest = 0;
        for (const int32_t layer : table.groups()[group].layers) {
          longest = std::max(longest, s.lengths[layer]);
        }
        const PageList& list = s.groups[group];
        ASSERT_EQ(static_cast<int64_t>(list.pages.size()), (longest + 31) / 32);
        for (int32_t page = 0; page < static_cast<int32_t>(list.pages.size()); ++page) {
          ASSERT_EQ(list.pages[page] == kNoPage, page < list.given_up);
          if (page >= list.given_up) ++holders[list.pages[page]];
        }
      }
      const PageAllocator& pages = table.pages(group);
      ASSERT_EQ(pages.used(), static_cast<int32_t>(holders.size())) << "at move " << i;
      int shared = 0;
      for (const auto& [page, count] : holders) shared += count > 1;
      ASSERT_EQ(pages.shared(), shared);
    }
  }
  EXPECT_EQ(table.given_up() > 0, !window_left.empty());
}

TEST(PagesTest, NeverLeak) { PagesNeverLeak({}); }
TEST(PagesTest, NeverLeakWhereTheyAreGivenUp) { PagesNeverLeak({40, 7}); }
TEST(PagesTest, NeverLeakWhereOneLayerGivesUp) { PagesNeverLeak({40, -1}, 25); }

}  // namespace
}  // namespace tributary::service
