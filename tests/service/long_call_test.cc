// Calls that are more than a step may take, with workers that compute.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tributary::service::testing
