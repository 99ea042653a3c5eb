// What all ranks hold, made of what each reports.
#include "service/schedule/reconcile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace tributary::service {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using worker::CommandMark;
using worker::HeldCache;
using worker::HeldSequence;
using worker::Undo;

constexpr int64_t kPageTokens = 64;

HeldCache Held(std::vector<HeldSequence> sequences, std::vector<Undo> undo = {}) {
  HeldCache held{.id = 1, .spec = {}, .sequences = std::move(sequences), .undo = std::move(undo)};
  held.spec.num_pages = 16;
  held.spec.layers.resize(1);
  return held;
}
HeldSequence Of(worker::SequenceId id, int64_t length, std::vector<int32_t> pages) {
  return {
      .id = id, .pages = std::move(pages), .given_up = 0, .lengths = {length}, .last_step = {0}};
}
Undo Wrote(uint64_t number, int64_t before) {
  return {.mark = {1, number}, .sequence = 7, .layer = 0, .length = before, .pages = {}};
}
Undo Grew(uint64_t number, int32_t table_size, int32_t first_index, std::vector<int32_t> pages) {
  return {.mark = {1, number},
          .sequence = 7,
          .layer = -1,
          .table_size = table_size,
          .first_index = first_index,
          .pages = std::move(pages)};
}

TEST(ReconcileTest, RanksThatAgreeKeepAll) {
  const HeldCache rank = Held({Of(7, 100, {3, 4}), Of(8, 10, {5})});
  const ReconciledCache all = Reconcile({&rank, &rank, &rank}, {1, 9}, kPageTokens);
  ASSERT_THAT(all.whole, SizeIs(2));
  EXPECT_THAT(all.whole[0].lengths, ElementsAre(100));
  EXPECT_THAT(all.whole[0].pages, ElementsAre(3, 4));
  EXPECT_THAT(all.lost, IsEmpty());
  EXPECT_THAT(all.absent, IsEmpty());
}

TEST(ReconcileTest, WhatOneRankDidAloneIsUndone) {
  const HeldCache ahead =
      Held({Of(7, 70, {9, 4})}, {Grew(5, 1, 0, {3}), Grew(5, 1, 1, {}), Wrote(5, 60)});
  const HeldCache behind = Held({Of(7, 60, {3})});
  const ReconciledCache all = Reconcile({&ahead, &behind}, {1, 4}, kPageTokens);
  ASSERT_THAT(all.whole, SizeIs(1));
  EXPECT_THAT(all.whole[0].lengths, ElementsAre(60));
  EXPECT_THAT(all.whole[0].pages, ElementsAre(3)) << "not the copy that was written to";
}

// The rank that is ahead cut the sequence to 10 and wrote other tokens there. The rank that is
// behind still has the old ones, up to 20: none of them beyond 10 are whole.
TEST(ReconcileTest, TokensWrittenAnewByOneRankAreNotMixedWithOldOnesOfAnother) {
  const HeldCache ahead = Held({Of(7, 15, {3})}, {Wrote(5, 10), Wrote(6, 12)});
  const HeldCache behind = Held({Of(7, 20, {3})});
  const ReconciledCache all = Reconcile({&ahead, &behind}, {1, 4}, kPageTokens);
  ASSERT_THAT(all.whole, SizeIs(1));
  EXPECT_THAT(all.whole[0].lengths, ElementsAre(10));
}

TEST(ReconcileTest, WhatAllHaveDoneStays) {
  const HeldCache rank = Held({Of(7, 70, {3, 4})}, {Grew(5, 1, 1, {}), Wrote(5, 60)});
  const ReconciledCache all = Reconcile({&rank, &rank}, {1, 5}, kPageTokens);
  ASSERT_THAT(all.whole, SizeIs(1));
  EXPECT_THAT(all.whole[0].lengths, ElementsAre(70));
}

TEST(ReconcileTest, ASequenceThatOneRankLacksWasBeingMadeOrClosed) {
  const HeldCache with = Held({Of(7, 70, {3, 4})});
  const HeldCache without = Held({});
  EXPECT_THAT(Reconcile({&with, &without}, {1, 5}, kPageTokens).absent, ElementsAre(7));
  EXPECT_THAT(Reconcile({&with, nullptr}, {1, 5}, kPageTokens).absent, ElementsAre(7))
      << "a rank without the cache";
}

TEST(ReconcileTest, WhatRanksDisagreeAboutIsLost) {
  const HeldCache one = Held({Of(7, 70, {3, 4})});
  for (const HeldSequence& other :
       {Of(7, 70, {3, 5}), Of(7, 70, {3}), HeldSequence{.id = 7, .pages = {3, 4}},
        HeldSequence{.id = 7, .pages = {3, 4}, .lengths = {-1}, .last_step = {0}}}) {
    const HeldCache two = Held({other});
    const ReconciledCache all = Reconcile({&one, &two}, {1, 5}, kPageTokens);
    EXPECT_THAT(all.whole, IsEmpty());
    ASSERT_THAT(all.lost, SizeIs(1));
    EXPECT_FALSE(all.lost[0].why.empty());
  }
  const HeldCache wild = Held({Of(7, 70, {3, 2'147'480'000})});
  EXPECT_THAT(Reconcile({&wild, &wild}, {1, 5}, kPageTokens).lost, SizeIs(1));
}

TEST(ReconcileTest, PagesGivenUpMayDiffer) {
  HeldCache one = Held({Of(7, 130, {0, 4, 5})});
  HeldCache two = Held({Of(7, 130, {9, 4, 5})});
  one.sequences[0].given_up = 1;
  const ReconciledCache all = Reconcile({&one, &two}, {1, 5}, kPageTokens);
  ASSERT_THAT(all.whole, SizeIs(1));
  EXPECT_EQ(all.whole[0].given_up, 1) << "known to one of them is enough";
}

TEST(ReconcileTest, TheLastCommandOfAllIsThatOfTheRankFurthestBehind) {
  worker::Holdings one{.rank = 0, .joined_epoch = 2, .last = {2, 3}, .caches = {}};
  worker::Holdings two{.rank = 1, .joined_epoch = 2, .last = {1, 80}, .caches = {}};
  EXPECT_EQ(LastOfAll({&one, nullptr, &two}), (CommandMark{1, 80}));
  EXPECT_EQ(LastOfAll({nullptr}), CommandMark());
}

}  // namespace
}  // namespace tributary::service
