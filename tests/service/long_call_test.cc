// Calls that are more than a step may take, with workers that compute.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

// SmallSpec: 4/2 heads of 64 and 64; a row and its token, in f32.
constexpr int64_t kBytesOfRow = 4 * 128 * (4 + 2);

class LongCallTest : public ::testing::Test {
 protected:
  LongCallTest() {
    for (TestService* service : {&whole_, &cut_}) {
      EXPECT_TRUE(CreateCache(service->stub(), "m", spec_).ok());
      for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(Open(service->stub(), "m", id).ok());
    }
  }
  // The replies of both services.
  struct Replies {
    v1::AttendReply whole, cut;
  };
  Replies Both(const v1::AttendRequest& request) {
    Replies replies;
    for (auto [service, reply] :
         {std::pair{&whole_, &replies.whole}, std::pair{&cut_, &replies.cut}}) {
      const grpc::Status status = Attend(service->stub(), request, reply);
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    EXPECT_EQ(replies.whole.lengths(0), replies.cut.lengths(0));
    EXPECT_EQ(replies.whole.output().shape(0), replies.cut.output().shape(0));
    return replies;
  }
  uint64_t StepsOf(TestService& service) { return service.Topology().statistics().steps(); }

  const v1::CacheSpec spec_ = SmallSpec();
  TestService whole_{{.workers = 3}};
  TestService cut_{{.workers = 3, .coordinator = {.max_step_bytes = 20 * kBytesOfRow}}};
};

TEST_F(LongCallTest, RowsThatReadTheCacheHaveTheSameBytesInSeveralSteps) {
  v1::AttendRequest verify = AttendOf(spec_, "m", 1, 0, 50);
  verify.set_return_lse(true);
  const Replies first = Both(verify);
  EXPECT_EQ(first.whole.output().inline_(), first.cut.output().inline_());
  EXPECT_EQ(first.whole.lse().inline_(), first.cut.lse().inline_());
  EXPECT_EQ(StepsOf(whole_), 1u);
  EXPECT_EQ(StepsOf(cut_), 3u);
  // Again, and with other bytes.
  EXPECT_EQ(Both(verify).cut.output().inline_(), first.cut.output().inline_());
  v1::AttendReply reply;
  v1::AttendRequest other = AttendOf(spec_, "m", 1, 0, 50, 0, /*seed=*/2);
  EXPECT_EQ(Attend(cut_.stub(), other, &reply).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  const Replies rows = Both(QueryOf(spec_, "m", 1, 3, 45, 0, /*seed=*/3));
  EXPECT_EQ(rows.whole.output().inline_(), rows.cut.output().inline_());
}

TEST_F(LongCallTest, APromptInSeveralStepsIsAsAccurateAsTheCache) {
  const Replies replies = Both(AttendOf(spec_, "m", 2, 0, 300));
  EXPECT_GT(StepsOf(cut_), 10u);
  const std::vector<float> whole = ValuesOf(replies.whole.output());
  const std::vector<float> cut = ValuesOf(replies.cut.output());
  ASSERT_EQ(whole.size(), cut.size());
  for (size_t i = 0; i < whole.size(); ++i) ASSERT_NEAR(whole[i], cut[i], 0.1) << i;
  // What follows reads the same cache.
  const Replies next = Both(AttendOf(spec_, "m", 2, 300, 1));
  EXPECT_EQ(next.whole.output().inline_(), next.cut.output().inline_());
}

TEST_F(LongCallTest, SeveralSequencesAndAnAppend) {
  v1::AppendRequest append = AppendOf(spec_, "m", 3, 0, 130);
  v1::AppendReply appended;
  for (TestService* service : {&whole_, &cut_}) {
    const grpc::Status status = Append(service->stub(), append, &appended);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(appended.lengths(0), 130);
  }
  v1::AttendRequest both = AttendOf(spec_, "m", 1, 0, 60);
  v1::AttendEntry* second = both.add_entries();
  both.mutable_entries(0)->set_query_rows(25);
  both.mutable_entries(0)->set_new_tokens(25);
  second->set_sequence_id(3);
  second->set_first_position(130);
  second->set_query_rows(35);
  second->set_new_tokens(35);
  const Replies replies = Both(both);
  EXPECT_EQ(replies.whole.output().inline_(), replies.cut.output().inline_());
  EXPECT_EQ(replies.cut.lengths(1), 165);
}

// While short calls come, long ones take turns with them, and nobody sees that in an answer.
class TurnsTest : public ::testing::TestWithParam<v1::DType> {
 protected:
  TurnsTest() {
    spec_.set_kv_dtype(GetParam());
    spec_.set_capacity_tokens(int64_t{1} << 14);
    spec_.add_layer_specs()->mutable_window()->set_left(200);
    spec_.add_layer_specs();
    for (TestService* service : {&whole_, &turns_}) {
      EXPECT_TRUE(CreateCache(service->stub(), "m", spec_).ok());
      for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(Open(service->stub(), "m", id).ok());
      v1::AttendReply reply;
      EXPECT_TRUE(Attend(service->stub(), AttendOf(spec_, "m", 1, 0, 1), &reply).ok());
    }
  }

  // Expects the same bytes of both.
  void Both(v1::AttendRequest request) {
    request.set_return_lse(true);
    const uint64_t before = turns_.Topology().statistics().steps();
    v1::AttendReply whole, turns;
    ASSERT_TRUE(Attend(whole_.stub(), request, &whole).ok());
    ASSERT_TRUE(Attend(turns_.stub(), request, &turns).ok());
    EXPECT_GT(turns_.Topology().statistics().steps(), before + 3);
    EXPECT_EQ(whole.output().inline_(), turns.output().inline_());
    EXPECT_EQ(whole.lse().inline_(), turns.lse().inline_());
    ASSERT_EQ(whole.lengths_size(), turns.lengths_size());
    for (int i = 0; i < whole.lengths_size(); ++i) EXPECT_EQ(whole.lengths(i), turns.lengths(i));
  }

  v1::CacheSpec spec_ = SmallSpec();
  TestService whole_{{.workers = 3, .coordinator = {.turn_memory = std::chrono::milliseconds(0)}}};
  TestService turns_{{.workers = 3, .coordinator = {.turn_memory = std::chrono::hours(1)}}};
};

TEST_P(TurnsTest, PromptsRepeatsAndRowsHaveTheSameBytes) {
  for (int32_t layer = 0; layer < 2; ++layer) {
    Both(AttendOf(spec_, "m", 2, 0, 700, layer));
    Both(AttendOf(spec_, "m", 2, 0, 700, layer));    // again
    Both(AttendOf(spec_, "m", 2, 700, 500, layer));  // behind what the cache has
    Both(QueryOf(spec_, "m", 2, 100, 1000, layer));  // rows alone
  }
  v1::AttendReply reply;
  EXPECT_EQ(
      Attend(turns_.stub(), AttendOf(spec_, "m", 2, 0, 700, 0, /*seed=*/2), &reply).error_code(),
      grpc::StatusCode::ALREADY_EXISTS);
  // What follows reads the same cache.
  v1::AttendReply whole, turns;
  ASSERT_TRUE(Attend(whole_.stub(), AttendOf(spec_, "m", 2, 1200, 1), &whole).ok());
  ASSERT_TRUE(Attend(turns_.stub(), AttendOf(spec_, "m", 2, 1200, 1), &turns).ok());
  EXPECT_EQ(whole.output().inline_(), turns.output().inline_());
}

// To keep many tokens takes the workers' time, too.
TEST_P(TurnsTest, AppendsTakeTurns) {
  const v1::AppendRequest append = AppendOf(spec_, "m", 2, 0, 12000);
  const uint64_t before = turns_.Topology().statistics().steps();
  v1::AppendReply appended;
  ASSERT_TRUE(Append(turns_.stub(), append, &appended).ok());
  EXPECT_EQ(appended.lengths(0), 12000);
  EXPECT_GT(turns_.Topology().statistics().steps(), before + 1);
  ASSERT_TRUE(Append(turns_.stub(), append, &appended).ok()) << "again";
  ASSERT_TRUE(Append(whole_.stub(), append, &appended).ok());
  v1::AttendReply whole, turns;
  ASSERT_TRUE(Attend(whole_.stub(), AttendOf(spec_, "m", 2, 12000, 1), &whole).ok());
  ASSERT_TRUE(Attend(turns_.stub(), AttendOf(spec_, "m", 2, 12000, 1), &turns).ok());
  EXPECT_EQ(whole.output().inline_(), turns.output().inline_());
}

TEST_P(TurnsTest, SeveralEntriesHaveTheSameBytes) {
  v1::AttendRequest request = AttendOf(spec_, "m", 2, 0, 900);
  request.mutable_entries(0)->set_query_rows(600);
  request.mutable_entries(0)->set_new_tokens(600);
  v1::AttendEntry* second = request.add_entries();
  second->set_sequence_id(3);
  second->set_query_rows(300);
  second->set_new_tokens(300);
  Both(request);
}

// Of a call in turns each token and row counts once, and none of one that is refused.
TEST_P(TurnsTest, AreCountedAsOneCall) {
  const auto counted = [&] { return turns_.Topology().statistics(); };
  const v1::Statistics before = counted();
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(turns_.stub(), AttendOf(spec_, "m", 2, 0, 700), &reply).ok());
  const v1::Statistics once = counted();
  EXPECT_GT(once.steps(), before.steps() + 3);
  EXPECT_EQ(once.tokens_appended(), before.tokens_appended() + 700);
  EXPECT_EQ(once.query_rows(), before.query_rows() + 700);
  EXPECT_FALSE(Attend(turns_.stub(), AttendOf(spec_, "m", 2, 0, 700, 0, /*seed=*/2), &reply).ok());
  EXPECT_EQ(counted().tokens_appended(), once.tokens_appended());
  EXPECT_EQ(counted().query_rows(), once.query_rows());
}

// An entry that a later turn carries out is named as the call has it.
TEST_P(TurnsTest, AConflictNamesTheEntryOfTheCall) {
  v1::AttendReply reply;
  ASSERT_TRUE(Attend(turns_.stub(), AttendOf(spec_, "m", 2, 0, 100), &reply).ok());
  v1::AttendRequest request = AttendOf(spec_, "m", 3, 0, 800, 0, /*seed=*/2);
  request.mutable_entries(0)->set_query_rows(700);
  request.mutable_entries(0)->set_new_tokens(700);
  v1::AttendEntry* second = request.add_entries();
  second->set_sequence_id(2);
  second->set_query_rows(100);
  second->set_new_tokens(100);
  const uint64_t before = turns_.Topology().statistics().steps();
  const grpc::Status refused = Attend(turns_.stub(), request, &reply);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(FieldOf(refused), "entries[1].first_position");
  EXPECT_GT(turns_.Topology().statistics().steps(), before + 3);
}

INSTANTIATE_TEST_SUITE_P(Types, TurnsTest, ::testing::Values(v1::DTYPE_BF16, v1::DTYPE_FP8_E4M3),
                         [](const auto& type) { return v1::DType_Name(type.param); });

}  // namespace
}  // namespace tributary::service::testing
