// What is missing after ranks were replaced, what is lost, and how the rest is brought back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "base/status/errors.h"
#include "base/status/rpc_errors.h"
#include "service/schedule/sequence_table.h"

namespace tributary::service {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int32_t kMost[] = {2};  // pages in one transfer

// Four ranks, 16 tokens each of a virtual page; rank r's pages are also kept by rank r + 1.
class RestoringTest : public ::testing::Test {
 protected:
  explicit RestoringTest(int32_t stride = 1)
      : table_({.layers = 1,
                .ranks = 4,
                .page_size = 16,
                .interleave = 16,
                .pages = 32,
                .max_sequences = 8,
                .name = "c",
                .replica_stride = stride}) {}

  // A sequence of `tokens` tokens.
  void Add(SequenceId id, int32_t tokens) {
    bool reopened = false;
    ASSERT_TRUE(table_.Open(id, &reopened).ok());
    Append(id, 0, tokens);
  }
  absl::StatusOr<StepReservation> Reserve(SequenceId id, int64_t first, int32_t tokens) {
    return table_.Reserve(
        0, worker::StepKind::kAppend,
        {{.sequence = id, .first_position = first, .query_rows = 0, .new_tokens = tokens}});
  }
  void Append(SequenceId id, int64_t first, int32_t tokens) {
    const auto reserved = Reserve(id, first, tokens);
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    table_.Commit(*reserved);
  }
  void Lose(std::vector<int> ranks) {
    std::vector<bool> fresh(4, false);
    for (const int rank : ranks) fresh[static_cast<size_t>(rank)] = true;
    table_.StopTransfers();
    table_.MarkLostOn(fresh);
  }
  // Everything that can be brought to a place is. Returns how many pages that were.
  int64_t BringAll(PagePlace to) {
    int64_t pages = 0;
    while (const auto transfer = table_.NextTransfer(to, kMost)) {
      EXPECT_LE(transfer->pages.size(), 2u);
      pages += static_cast<int64_t>(transfer->pages.size());
      table_.EndTransfer(*transfer, true);
    }
    return pages;
  }
  absl::Status There(SequenceId id) {
    return table_.CheckThere([] { return "x"; }, *table_.Find(id));
  }

  SequenceTable table_;
};

TEST_F(RestoringTest, SequencesWaitForTheirPagesOneByOne) {
  Add(1, 200);  // four pages, tokens of rank 2 in three of them
  Add(2, 100);  // two pages, tokens of rank 2 in one or two
  Add(3, 20);   // ranks 0 and 1 alone
  Lose({2});
  EXPECT_EQ(table_.lost(), 0);
  const absl::Status waits = Reserve(1, 200, 1).status();
  EXPECT_EQ(waits.code(), absl::StatusCode::kUnavailable) << waits;
  EXPECT_TRUE(RetryDelayOf(waits).has_value());
  EXPECT_EQ(table_.Fork(1, 9, 10).status().code(), absl::StatusCode::kUnavailable);
  Append(3, 20, 4);  // nothing of it is missing
  while (!There(1).ok()) {
    const auto transfer = table_.NextTransfer(PagePlace::kRank, kMost);
    ASSERT_TRUE(transfer.has_value());
    EXPECT_EQ(transfer->rank, 2);
    table_.EndTransfer(*transfer, true);
  }
  Append(1, 200, 1);
  EXPECT_FALSE(There(2).ok());
  BringAll(PagePlace::kRank);
  Append(2, 100, 1);
  EXPECT_EQ(table_.missing(PagePlace::kRank), 0);
  // Rank 2 kept the pages of rank 1.
  EXPECT_EQ(table_.missing(PagePlace::kReplica, 1), table_.missing(PagePlace::kReplica));
  EXPECT_EQ(BringAll(PagePlace::kReplica), 3 + 2 + 1);
  EXPECT_EQ(table_.missing(PagePlace::kReplica), 0);
}

TEST_F(RestoringTest, RanksSideBySideLoseWhatOneKeptOfTheOther) {
  Add(1, 200);
  Add(2, 16);  // rank 0 alone, which rank 1 keeps
  Lose({2, 3});
  EXPECT_TRUE(table_.Find(1)->lost);
  EXPECT_FALSE(table_.Find(2)->lost);
  Append(2, 16, 100);  // comes to ranks whose page was lost with the other sequence's tokens
  EXPECT_TRUE(There(2).ok());
}

TEST_F(RestoringTest, RanksApartLoseNothing) {
  Add(1, 200);
  Lose({0, 2});
  EXPECT_EQ(table_.lost(), 0);
  EXPECT_EQ(BringAll(PagePlace::kRank), 4 + 3);
  EXPECT_TRUE(There(1).ok());
}

TEST_F(RestoringTest, ASecondLossBeforeTheReplicaIsThereLosesWhatHasNone) {
  Add(1, 200);
  Lose({2});
  BringAll(PagePlace::kRank);
  const auto transfer = table_.NextTransfer(PagePlace::kReplica, kMost);
  table_.EndTransfer(*transfer, true);
  Lose({1});  // two of its pages are on rank 2 again, the third is not
  EXPECT_TRUE(table_.Find(1)->lost);
  const auto missing = MissingTokensOf(Reserve(1, 200, 1).status());
  ASSERT_TRUE(missing.has_value());
  EXPECT_THAT(missing->ranges, ElementsAre(PositionRange{144, 160}));
  EXPECT_EQ(Reserve(1, 144, 16).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(BringAll(PagePlace::kRank), 2);
  Append(1, 144, 16);
  Append(1, 200, 1);
  EXPECT_EQ(BringAll(PagePlace::kReplica), 4) << "those of rank 0, which rank 1 keeps";
  Lose({1});
  EXPECT_FALSE(table_.Find(1)->lost) << "what was brought is kept twice, too";
}

TEST_F(RestoringTest, ASecondLossAfterwardsLosesNothing) {
  Add(1, 200);
  for (const int rank : {2, 1, 0, 3, 2}) {
    Lose({rank});
    EXPECT_FALSE(table_.Find(1)->lost);
    EXPECT_GT(BringAll(PagePlace::kRank), 0);
    EXPECT_GT(BringAll(PagePlace::kReplica), 0);
    EXPECT_TRUE(There(1).ok());
  }
}

TEST_F(RestoringTest, AGroupThatBreaksGoesOnWhereItWas) {
  Add(1, 200);
  Lose({2});
  const auto done = table_.NextTransfer(PagePlace::kRank, kMost);
  const auto on_way = table_.NextTransfer(PagePlace::kRank, kMost);
  ASSERT_TRUE(done.has_value() && on_way.has_value());
  EXPECT_FALSE(table_.NextTransfer(PagePlace::kRank, kMost).has_value()) << "all is on its way";
  table_.EndTransfer(*done, true);
  Lose({});
  EXPECT_EQ(BringAll(PagePlace::kRank), static_cast<int64_t>(on_way->pages.size()));
  EXPECT_TRUE(There(1).ok());
}

TEST_F(RestoringTest, PagesThatAreFreedAreMissedNoMore) {
  Add(1, 200);
  Lose({2});
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(table_.missing(PagePlace::kRank), 0);
  EXPECT_EQ(table_.missing(PagePlace::kReplica), 0);
  Add(2, 200);  // takes the same pages
  EXPECT_TRUE(There(2).ok());
}

TEST_F(RestoringTest, AForksPageIsBroughtOnce) {
  Add(1, 64);
  ASSERT_TRUE(table_.Fork(1, 2, 64).ok());
  Lose({2});
  EXPECT_FALSE(There(2).ok());
  EXPECT_EQ(BringAll(PagePlace::kRank), 1);
  EXPECT_TRUE(There(1).ok());
  EXPECT_TRUE(There(2).ok());
}

TEST_F(RestoringTest, ACopyOfAPageWithoutReplicaHasNoneEither) {
  Add(1, 40);
  ASSERT_TRUE(table_.Fork(1, 2, 40).ok());
  Lose({1});
  BringAll(PagePlace::kRank);
  // The step copies the page on all ranks, after a transfer that is decided before it ends.
  const auto step = Reserve(2, 40, 1);
  ASSERT_TRUE(step.ok()) << step.status();
  ASSERT_THAT(step->page_copies, SizeIs(1));
  EXPECT_EQ(BringAll(PagePlace::kReplica), 1) << "the source";
  EXPECT_EQ(table_.missing(PagePlace::kReplica), 1) << "the copy waits for the step";
  table_.Commit(*step);
  EXPECT_EQ(BringAll(PagePlace::kReplica), 1);
  EXPECT_EQ(table_.missing(PagePlace::kReplica), 0);
}

TEST_F(RestoringTest, RanksThatLackNothingAnyMoreAreToldSo) {
  Add(1, 64);
  Lose({2});
  BringAll(PagePlace::kRank);
  Lose({3});
  int told = 0;
  while (const auto transfer = table_.NextTransfer(PagePlace::kRank, kMost)) {
    if (transfer->complete) {
      EXPECT_THAT(transfer->pages, IsEmpty());
      EXPECT_EQ(transfer->rank, 3);
      table_.EndTransfer(*transfer, ++told > 1);  // the first attempt comes to nothing
    } else {
      table_.EndTransfer(*transfer, true);
    }
  }
  EXPECT_EQ(told, 2);
}

class WithoutReplicasTest : public RestoringTest {
 protected:
  WithoutReplicasTest() : RestoringTest(0) {}
};

TEST_F(WithoutReplicasTest, EverythingOnTheRankIsLost) {
  Add(1, 200);
  Add(2, 20);
  ASSERT_TRUE(table_.Fork(1, 3, 20).ok());
  Lose({2});
  EXPECT_TRUE(table_.Find(1)->lost);
  EXPECT_FALSE(table_.Find(2)->lost);
  EXPECT_FALSE(table_.Find(3)->lost);
  Append(3, 20, 100);
  EXPECT_EQ(BringAll(PagePlace::kRank) + BringAll(PagePlace::kReplica), 0);
}

TEST_F(WithoutReplicasTest, AHandOverKeepsAllUntilTheSuccessorHasIt) {
  Add(1, 200);
  EXPECT_FALSE(table_.MayLeave(2));
  table_.KeepForHandOver(2);
  EXPECT_FALSE(table_.MayLeave(2));
  Append(1, 200, 30);  // written to the keeper's copy as well
  BringAll(PagePlace::kReplica);
  EXPECT_TRUE(table_.MayLeave(2));
  Lose({2});
  EXPECT_EQ(table_.lost(), 0);
  EXPECT_TRUE(table_.KeptForHandOver(2));
  EXPECT_FALSE(There(1).ok());
  EXPECT_EQ(BringAll(PagePlace::kRank), 4);
  EXPECT_TRUE(There(1).ok());
  EXPECT_FALSE(table_.KeptForHandOver(2)) << "the keeper has been told";
  Lose({2});
  EXPECT_EQ(table_.lost(), 1);
}

TEST_F(WithoutReplicasTest, AKeeperThatGoesTakesWhatItKeptAlong) {
  Add(1, 200);
  table_.KeepForHandOver(2);
  BringAll(PagePlace::kReplica);
  Add(2, 40);  // ranks 0 to 2
  Lose({3});
  EXPECT_TRUE(table_.Find(1)->lost);
  EXPECT_FALSE(table_.Find(2)->lost);
  EXPECT_FALSE(table_.KeptForHandOver(2));
  EXPECT_FALSE(table_.MayLeave(2));
}

TEST_F(WithoutReplicasTest, WhoStaysAfterAllIsKeptNoMore) {
  Add(1, 200);
  table_.KeepForHandOver(2);
  BringAll(PagePlace::kReplica);
  Lose({});
  EXPECT_TRUE(There(1).ok());
  const auto told = table_.NextTransfer(PagePlace::kRank, kMost);
  ASSERT_TRUE(told.has_value());
  EXPECT_TRUE(told->complete && told->ends_hand_over);
  EXPECT_FALSE(table_.MayLeave(2));
}

TEST_F(WithoutReplicasTest, AStepThatCopiesAPageWhileAHandOverBeginsIsWaitedFor) {
  Add(1, 40);
  ASSERT_TRUE(table_.Fork(1, 2, 40).ok());
  const auto step = Reserve(2, 40, 1);
  ASSERT_THAT(step->page_copies, SizeIs(1));
  table_.KeepForHandOver(0);
  BringAll(PagePlace::kReplica);
  EXPECT_FALSE(table_.MayLeave(0));
  table_.Commit(*step);
  BringAll(PagePlace::kReplica);
  EXPECT_TRUE(table_.MayLeave(0));
}

}  // namespace
}  // namespace tributary::service
