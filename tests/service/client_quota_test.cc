// What clients are charged for: the account by itself, and the sequence table's use of it.
#include "service/schedule/client_quota.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "base/status/rpc_errors.h"
#include "google/rpc/error_details.pb.h"
#include "service/schedule/sequence_table.h"

namespace tributary::service {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPageTokens = 32;  // page_size * ranks

TableGeometry SmallGeometry(int32_t pages = 64, worker::CacheId cache = 7) {
  return {.layers = 1,
          .ranks = 2,
          .page_size = 16,
          .interleave = 16,
          .pages = pages,
          .max_sequences = 100,
          .name = "c",
          .first_id = cache};
}

// What the refusal says ran out.
std::string SubjectOf(const absl::Status& status) {
  const google::rpc::Status rpc = ToRpcStatus(status);
  for (const auto& detail : rpc.details()) {
    google::rpc::QuotaFailure quota;
    if (detail.UnpackTo(&quota)) return quota.violations(0).subject();
  }
  return "";
}

class ClientQuotaTest : public ::testing::Test {
 protected:
  void Limit(const ClientLimits& limits) {
    limits_ = limits;
    quota_.emplace(&limits_,
                   [this](ClientLimit limit) { ++refusals_[static_cast<size_t>(limit)]; });
    a_ = quota_->Of("a");
    b_ = quota_->Of("b");
  }
  absl::Status Open(SequenceId id, const ClientAccountPtr& owner) {
    bool reopened = false;
    return table_.Open(id, &reopened, owner).status();
  }
  absl::StatusOr<StepReservation> Plan(SequenceId id, int64_t first, int32_t tokens) {
    return table_.Reserve(0, worker::StepKind::kAppend,
                          {{.sequence = id, .first_position = first, .new_tokens = tokens}});
  }
  absl::Status Append(SequenceId id, int32_t tokens) {
    const auto plan = Plan(id, LeastLength(*table_.Find(id)), tokens);
    if (plan.ok()) table_.Commit(*plan);
    return plan.status();
  }

  ClientLimits limits_;
  std::optional<ClientQuota> quota_;
  ClientAccountPtr a_;
  ClientAccountPtr b_;
  std::array<int, kClientLimits> refusals_{};  // by ClientLimit
  SequenceTable table_{SmallGeometry()};
};

TEST_F(ClientQuotaTest, NobodyIsCountedWithoutLimits) {
  Limit({});
  EXPECT_EQ(a_, nullptr);
  EXPECT_EQ(quota_->size(), 0u);
}

TEST_F(ClientQuotaTest, AClientIsOneAccountAsLongAsItHoldsSomething) {
  Limit({.sequences = 1});
  EXPECT_EQ(quota_->Of("a"), a_);
  EXPECT_NE(a_, b_);
  ASSERT_TRUE(Open(1, a_).ok());
  a_.reset();
  EXPECT_EQ(quota_->Of("a")->sequences(), 1);
}

TEST_F(ClientQuotaTest, AccountsOfClientsThatHoldNothingAreForgotten) {
  Limit({.sequences = 1});
  for (int i = 0; i < 10'000; ++i) quota_->Of("client" + std::to_string(i));
  EXPECT_LE(quota_->size(), 64u);
  EXPECT_EQ(quota_->Of("a"), a_);
}

TEST_F(ClientQuotaTest, ALimitThatChangesHoldsFromThenOn) {
  Limit({.sequences = 1, .pages = 100});
  ASSERT_TRUE(Open(1, a_).ok());
  EXPECT_FALSE(Open(2, a_).ok());
  limits_.sequences = 3;
  ASSERT_TRUE(Open(2, a_).ok());
  limits_.sequences = 1;
  EXPECT_FALSE(Open(3, a_).ok());
  EXPECT_EQ(a_->sequences(), 2) << "what the client has it keeps";
  limits_.sequences = 0;
  EXPECT_TRUE(Open(3, a_).ok());
  ASSERT_TRUE(Append(1, 2 * kPageTokens).ok());
  limits_.pages = 2;
  EXPECT_FALSE(Append(1, 1).ok());
  limits_.pages = 3;
  EXPECT_TRUE(Append(1, 1).ok());
}

TEST_F(ClientQuotaTest, SequencesCountForWhoOpenedThemUntilTheyAreClosed) {
  Limit({.sequences = 2});
  EXPECT_TRUE(Open(1, a_).ok());
  EXPECT_TRUE(table_.Fork(1, 2, 0, a_).ok());
  const absl::Status refused = Open(3, a_);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(SubjectOf(refused), "client:a sequences");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_sequences_per_client"));
  EXPECT_EQ(table_.Find(3), nullptr);
  EXPECT_FALSE(table_.Fork(1, 3, 0, a_).ok());
  EXPECT_EQ(table_.Find(3), nullptr);
  EXPECT_EQ(refusals_.at(static_cast<size_t>(ClientLimit::kSequences)), 2);

  EXPECT_TRUE(Open(1, a_).ok()) << "the same again takes no place";
  EXPECT_TRUE(Open(4, b_).ok()) << "another client has room";
  EXPECT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(a_->sequences(), 1);
  EXPECT_TRUE(Open(3, a_).ok());
}

TEST_F(ClientQuotaTest, WhoReopensASequenceAnswersForIt) {
  Limit({.sequences = 1});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Open(1, b_).ok());
  EXPECT_EQ(a_->sequences(), 0);
  EXPECT_EQ(b_->sequences(), 1);
  ASSERT_TRUE(Open(2, a_).ok());
  EXPECT_EQ(SubjectOf(Open(1, a_)), "client:a sequences");
  EXPECT_EQ(table_.Find(1)->owner, b_) << "refused, and nothing changed";
}

TEST_F(ClientQuotaTest, LostSequencesOfWhichNothingIsLeftAreNobodys) {
  Limit({.sequences = 1, .pages = 2});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 64).ok());
  EXPECT_EQ(a_->pages(), 2);
  table_.MarkLostOn({true, false});
  EXPECT_TRUE(table_.Find(1)->lost);
  EXPECT_EQ(a_->sequences(), 1);
  EXPECT_EQ(a_->pages(), 2) << "what is left is kept for it";
  table_.MarkLostOn({false, true});
  EXPECT_EQ(a_->sequences(), 0);
  EXPECT_EQ(a_->pages(), 0);
  ASSERT_TRUE(Open(2, a_).ok());
  EXPECT_FALSE(Open(1, a_).ok()) << "it takes a place again";
  EXPECT_TRUE(table_.Find(1)->lost);
  EXPECT_TRUE(Open(1, b_).ok());
}

TEST_F(ClientQuotaTest, AStepThatNeedsTooManyPagesChangesNothing) {
  Limit({.pages = 2});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Open(2, b_).ok());
  ASSERT_TRUE(Append(1, 33).ok());
  const auto refused = Plan(1, 33, 32);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(SubjectOf(refused.status()), "client:a pages");
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("max_pages_per_client"));
  EXPECT_EQ(refusals_.at(static_cast<size_t>(ClientLimit::kPages)), 1);
  EXPECT_EQ(a_->pages(), 2);
  EXPECT_EQ(table_.pages().used(), 2);
  EXPECT_TRUE(Append(1, 31).ok()) << "what the held pages have room for";
  EXPECT_TRUE(Append(2, 64).ok()) << "another client";
  // Of several entries the one at fault takes the rest along, and leaves no charge.
  ASSERT_TRUE(Open(3, b_).ok());
  ASSERT_TRUE(table_.Truncate(2, 32).ok());
  EXPECT_FALSE(table_
                   .Reserve(0, worker::StepKind::kAppend,
                            {{.sequence = 3, .first_position = 0, .new_tokens = 1},
                             {.sequence = 2, .first_position = 32, .new_tokens = 1}})
                   .ok());
  EXPECT_EQ(b_->pages(), 1);
}

TEST_F(ClientQuotaTest, PagesOfAStepCountFromItsPlanAndNoLongerWhenItIsRolledBack) {
  Limit({.pages = 2});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Open(2, a_).ok());
  const auto plan = Plan(1, 0, 64);
  ASSERT_TRUE(plan.ok());
  EXPECT_FALSE(Append(2, 1).ok());
  table_.Rollback(*plan);
  EXPECT_EQ(a_->pages(), 0);
  EXPECT_TRUE(Append(2, 1).ok());
}

TEST_F(ClientQuotaTest, TruncatingAndClosingGivePagesBack) {
  Limit({.pages = 4});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 128).ok());
  ASSERT_TRUE(table_.Truncate(1, 33).ok());
  EXPECT_EQ(a_->pages(), 2);
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(a_->pages(), 0);
}

TEST_F(ClientQuotaTest, ForksOfOneClientShareTheirPagesUntilTheyWrite) {
  Limit({.pages = 4});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 80).ok());
  for (SequenceId child = 2; child < 20; ++child) {
    ASSERT_TRUE(table_.Fork(1, child, -1, a_).ok());
  }
  EXPECT_EQ(a_->pages(), 3);
  EXPECT_TRUE(Append(2, 1).ok()) << "a copy of the last page";
  EXPECT_EQ(a_->pages(), 4);
  EXPECT_FALSE(Append(3, 1).ok());
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(a_->pages(), 4) << "the others hold them still";
  for (SequenceId child = 3; child < 20; ++child) ASSERT_TRUE(table_.Close(child).ok());
  EXPECT_EQ(a_->pages(), 3);
  ASSERT_TRUE(table_.Close(2).ok());
  EXPECT_EQ(a_->pages(), 0);
}

TEST_F(ClientQuotaTest, AnothersPrefixCountsForWhoForkedItToo) {
  Limit({.sequences = 3, .pages = 3});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 96).ok());
  ASSERT_TRUE(Open(2, b_).ok());
  ASSERT_TRUE(Append(2, 32).ok());
  EXPECT_EQ(SubjectOf(table_.Fork(1, 3, -1, b_).status()), "client:b pages");
  EXPECT_EQ(table_.Find(3), nullptr);
  EXPECT_EQ(b_->sequences(), 1);
  ASSERT_TRUE(table_.Fork(1, 3, 64, b_).ok());
  EXPECT_EQ(a_->pages(), 3);
  EXPECT_EQ(b_->pages(), 3);
  ASSERT_TRUE(table_.Fork(1, 4, 64, b_).ok()) << "the same pages once more";
  EXPECT_EQ(b_->pages(), 3);
  ASSERT_TRUE(table_.Close(1).ok());
  EXPECT_EQ(a_->pages(), 0);
  EXPECT_EQ(table_.pages().used(), 3);
}

TEST_F(ClientQuotaTest, SeveralCachesCountTogetherAndADeletedOneCountsNoLonger) {
  Limit({.sequences = 3, .pages = 4});
  SequenceTable other(SmallGeometry(64, 8));
  bool reopened = false;
  ASSERT_TRUE(other.Open(1, &reopened, a_).ok());
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 64).ok());
  const std::vector<worker::StepEntry> two = {
      {.sequence = 1, .first_position = 0, .new_tokens = 64}};
  const auto settled_later = other.Reserve(0, worker::StepKind::kAppend, two);
  ASSERT_TRUE(settled_later.ok());
  EXPECT_EQ(a_->pages(), 4) << "page numbers of different caches are different pages";
  EXPECT_FALSE(Append(1, 1).ok());
  other.DisownAll();
  EXPECT_EQ(a_->pages(), 2);
  EXPECT_EQ(a_->sequences(), 1);
  other.Commit(*settled_later);
  EXPECT_EQ(a_->pages(), 2);
  EXPECT_TRUE(Append(1, 1).ok());
}

TEST_F(ClientQuotaTest, AStepOfASequenceThatWasLostMeanwhileLeavesNoCharge) {
  Limit({.pages = 4});
  ASSERT_TRUE(Open(1, a_).ok());
  ASSERT_TRUE(Append(1, 32).ok());
  for (const bool commit : {true, false}) {
    const auto plan = Plan(1, LeastLength(*table_.Find(1)), 64);
    ASSERT_TRUE(plan.ok()) << plan.status();
    table_.MarkLost(table_.Find(1));
    commit ? table_.Commit(*plan) : table_.Rollback(*plan);
    EXPECT_EQ(a_->pages(), 0);
    EXPECT_EQ(table_.pages().used(), 0);
    ASSERT_TRUE(Open(1, a_).ok());
  }
}

TEST(ClientQuotaWindowTest, PagesThatAreGivenUpCountNoLonger) {
  TableGeometry geometry = SmallGeometry();
  geometry.window_left = {40};
  geometry.rollback_tokens = 10;
  SequenceTable table(geometry);
  const ClientLimits limits{.pages = 4};
  ClientQuota quota(&limits, nullptr);
  const ClientAccountPtr a = quota.Of("a");
  bool reopened = false;
  ASSERT_TRUE(table.Open(1, &reopened, a).ok());
  for (int64_t first = 0; first < 100 * kPageTokens; first += 16) {
    const auto plan = table.Reserve(0, worker::StepKind::kAppend,
                                    {{.sequence = 1, .first_position = first, .new_tokens = 16}});
    ASSERT_TRUE(plan.ok()) << plan.status();
    table.Commit(*plan);
    ASSERT_EQ(a->pages(), table.pages().used());
  }
  ASSERT_TRUE(table.Fork(1, 2, -1, a).ok());
  EXPECT_EQ(a->pages(), table.pages().used());
}

TEST(ClientQuotaWindowTest, PagesOfEveryGroupOfLayersCount) {
  TableGeometry geometry = SmallGeometry();
  geometry.layers = 2;
  geometry.window_left = {-1, 40};
  geometry.rollback_tokens = kPageTokens;
  geometry.window_pages = 8;
  SequenceTable table(geometry);
  ASSERT_EQ(table.groups().size(), 2);
  const ClientLimits limits{.pages = 7};
  ClientQuota quota(&limits, nullptr);
  const ClientAccountPtr a = quota.Of("a");
  const ClientAccountPtr b = quota.Of("b");
  bool reopened = false;
  ASSERT_TRUE(table.Open(1, &reopened, a).ok());
  const auto append = [&](int32_t layer, int64_t first, int32_t tokens) {
    const auto plan =
        table.Reserve(layer, worker::StepKind::kAppend,
                      {{.sequence = 1, .first_position = first, .new_tokens = tokens}});
    if (plan.ok()) table.Commit(*plan);
    return plan.status();
  };
  ASSERT_TRUE(append(0, 0, 3 * kPageTokens).ok());
  ASSERT_TRUE(append(1, 0, 3 * kPageTokens).ok());
  EXPECT_EQ(a->pages(), 6);
  EXPECT_EQ(a->pages(), table.pages(0).used() + table.pages(1).used());
  EXPECT_TRUE(append(0, 3 * kPageTokens, kPageTokens).ok());
  EXPECT_EQ(append(1, 3 * kPageTokens, kPageTokens).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(table.Truncate(1, 2 * kPageTokens).ok());
  EXPECT_EQ(a->pages(), 4);
  ASSERT_TRUE(table.Fork(1, 2, -1, b).ok());
  EXPECT_EQ(b->pages(), 4);
  table.DisownAll();
  EXPECT_EQ(a->pages() + b->pages(), 0);
}

// Whatever happens, an account says what a look at all tables says, and is within its limits.
TEST_F(ClientQuotaTest, AgreesWithALookAtAllSequences) {
  constexpr int64_t kMostPages = 12;
  constexpr int64_t kMostSequences = 5;
  Limit({.sequences = kMostSequences, .pages = kMostPages});
  const std::array<ClientAccountPtr, 2> accounts = {a_, b_};
  std::mt19937 random(1);
  const auto pick = [&](int64_t most) { return static_cast<int64_t>(random() % (most + 1)); };
  for (int i = 0; i < 20'000; ++i) {
    const auto id = static_cast<SequenceId>(1 + pick(11));
    const auto other = static_cast<SequenceId>(1 + pick(11));
    const ClientAccountPtr& client = accounts[pick(1)];
    Sequence* sequence = table_.Find(id);
    switch (pick(7)) {
      case 0:
        (void)Open(id, client);
        break;
      case 1:
        (void)table_.Fork(id, other, -1, client);
        break;
      case 2:
        (void)table_.Truncate(id, pick(200));
        break;
      case 3:
        if (pick(2) == 0) (void)table_.Close(id);
        break;
      case 4:
        if (sequence != nullptr && pick(9) == 0) table_.MarkLost(sequence);
        break;
      default: {
        if (sequence == nullptr) break;
        const auto plan = Plan(id, sequence->lengths[0], static_cast<int32_t>(1 + pick(70)));
        if (!plan.ok()) break;
        pick(3) == 0 ? table_.Rollback(*plan) : table_.Commit(*plan);
      }
    }
    for (const ClientAccountPtr& account : accounts) {
      std::set<int32_t> pages;
      int64_t sequences = 0;
      for (const auto& [held_id, held] : table_.sequences()) {
        if (held->owner != account) continue;
        ++sequences;
        pages.insert(held->groups[0].pages.begin(), held->groups[0].pages.end());
      }
      ASSERT_EQ(account->sequences(), sequences);
      ASSERT_EQ(account->pages(), static_cast<int64_t>(pages.size()));
      ASSERT_LE(sequences, kMostSequences);
      ASSERT_LE(account->pages(), kMostPages);
    }
  }
  EXPECT_GT(refusals_[static_cast<size_t>(ClientLimit::kSequences)], 100);
  EXPECT_GT(refusals_[static_cast<size_t>(ClientLimit::kPages)], 100);
}

}  // namespace
}  // namespace tributary::service
