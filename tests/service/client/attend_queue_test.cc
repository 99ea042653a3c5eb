#include "service/client/attend_queue.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tributary::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const absl::Status kUnavailable = absl::UnavailableError("later");

// Delays are then 50, 100, 200 ms.
double LeastDelay() { return 0.0; }

class AttendQueueTest : public ::testing::Test {
 protected:
  CallPtr Add(std::vector<uint64_t> sequences, seconds timeout = seconds(30)) {
    auto call = std::make_shared<PendingCall>();
    call->call.cache_id = "cache";
    for (const uint64_t id : sequences) call->call.entries.push_back({id, 0, 1, 1});
    call->deadline = now_ + timeout;
    call->placed = true;
    queue_.Add(call);
    return call;
  }
  CallPtr Send() { return queue_.NextToSend(now_); }
  bool Fail(const CallPtr& call, const absl::Status& status) {
    EXPECT_EQ(queue_.TakeSent(call->request.request_id()), call) << "was not in flight";
    return queue_.Repeat(call, status, now_);
  }

  Clock::time_point now_ = Clock::time_point(seconds(1'000));
  AttendQueue queue_{4, LeastDelay};
};

TEST_F(AttendQueueTest, SendsInTheOrderOfCalls) {
  const CallPtr a = Add({1});
  const CallPtr b = Add({1});
  const CallPtr c = Add({2});
  EXPECT_LT(a->request.request_id(), b->request.request_id());
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), b);
  EXPECT_EQ(Send(), c);
  EXPECT_EQ(Send(), nullptr);
}

TEST_F(AttendQueueTest, ACallThatWaitsHoldsBackItsSequencesOnly) {
  const CallPtr a = Add({1});
  ASSERT_EQ(Send(), a);
  ASSERT_TRUE(Fail(a, kUnavailable));
  const CallPtr same = Add({1, 2});
  const CallPtr behind = Add({2});  // behind `same`, which is behind `a`
  const CallPtr other = Add({3});
  EXPECT_EQ(Send(), other);
  EXPECT_EQ(Send(), nullptr);
  EXPECT_EQ(queue_.NextEvent(now_), now_ + milliseconds(50));
  now_ += milliseconds(50);
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), same);
  EXPECT_EQ(Send(), behind);
}

TEST_F(AttendQueueTest, TheSameIdInAnotherCacheIsAnotherSequence) {
  const CallPtr a = Add({1});
  ASSERT_EQ(Send(), a);
  ASSERT_TRUE(Fail(a, kUnavailable));
  auto other = std::make_shared<PendingCall>();
  other->call.cache_id = "another";
  other->call.entries.push_back({1, 0, 1, 1});
  other->deadline = now_ + seconds(30);
  other->placed = true;
  queue_.Add(other);
  EXPECT_EQ(Send(), other);
}

TEST_F(AttendQueueTest, OutOfRangeIsRepeatedOnlyForACallThatCameTooEarly) {
  const CallPtr a = Add({1});
  const CallPtr b = Add({1});
  const CallPtr c = Add({2});
  ASSERT_EQ(Send(), a);
  ASSERT_EQ(Send(), b);
  ASSERT_EQ(Send(), c);
  const absl::Status gap = absl::OutOfRangeError("length is 0");
  ASSERT_TRUE(Fail(a, kUnavailable));
  EXPECT_FALSE(Fail(c, gap)) << "nothing of its sequence was repeated";
  EXPECT_TRUE(Fail(b, gap));
  EXPECT_EQ(b->failures, 0) << "coming too early is no failure of its own";
  EXPECT_EQ(Send(), nullptr) << "b goes after a";
  now_ += milliseconds(50);
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), nullptr);
  EXPECT_EQ(queue_.TakeSent(a->request.request_id()), a);
  EXPECT_EQ(Send(), b);
  EXPECT_FALSE(Fail(b, gap)) << "in order this time: the gap is the caller's";
}

// Answers may come in another order than they were given.
TEST_F(AttendQueueTest, OutOfRangeWaitsForTheEarlierCallsAnswer) {
  const CallPtr a = Add({1});
  const CallPtr b = Add({1});
  ASSERT_EQ(Send(), a);
  ASSERT_EQ(Send(), b);
  const absl::Status gap = absl::OutOfRangeError("length is 0");
  ASSERT_TRUE(Fail(b, gap)) << "a may have failed already, unheard";
  EXPECT_EQ(Send(), nullptr) << "not while a is in flight";
  ASSERT_TRUE(Fail(a, kUnavailable));
  now_ += milliseconds(50);
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), nullptr);
  EXPECT_EQ(queue_.TakeSent(a->request.request_id()), a);
  EXPECT_EQ(Send(), b);
  EXPECT_FALSE(Fail(b, gap));
}

TEST_F(AttendQueueTest, GivesUpAfterTheLastAttempt) {
  const CallPtr a = Add({1});
  for (int attempt = 1; attempt < 4; ++attempt) {
    ASSERT_EQ(Send(), a) << attempt;
    ASSERT_TRUE(Fail(a, attempt % 2 == 0 ? kUnavailable : absl::AbortedError(""))) << attempt;
    now_ = a->not_before;
  }
  ASSERT_EQ(Send(), a);
  EXPECT_FALSE(Fail(a, kUnavailable));
  EXPECT_EQ(Send(), nullptr);
}

TEST_F(AttendQueueTest, FinalCodesAreNeverRepeated) {
  for (int code = 1; code <= 16; ++code) {
    const auto status = absl::Status(static_cast<absl::StatusCode>(code), "x");
    if (absl::IsUnavailable(status) || absl::IsAborted(status)) continue;
    const CallPtr a = Add({1});
    ASSERT_EQ(Send(), a);
    EXPECT_FALSE(Fail(a, status)) << status;
  }
}

TEST_F(AttendQueueTest, DoesNotWaitBeyondTheDeadline) {
  const CallPtr a = Add({1});
  a->deadline = now_ + milliseconds(40);
  ASSERT_EQ(Send(), a);
  EXPECT_FALSE(Fail(a, kUnavailable)) << "the next attempt would come 50 ms from now";
}

TEST_F(AttendQueueTest, OverdueCallsLeaveWhereverTheyAre) {
  const CallPtr sent = Add({1}, seconds(1));
  const CallPtr waiting = Add({1}, seconds(1));
  const CallPtr later = Add({1}, seconds(2));
  const CallPtr hasty = Add({2}, seconds(1));  // made last, due first
  ASSERT_EQ(Send(), sent);
  EXPECT_EQ(queue_.NextEvent(now_), now_ + seconds(1));
  now_ += seconds(1);
  const AttendQueue::Ended overdue = queue_.TakeEnded(now_);
  EXPECT_EQ(overdue.sent, std::vector<CallPtr>{sent});
  EXPECT_EQ(overdue.unsent, (std::vector<CallPtr>{waiting, hasty}));
  EXPECT_EQ(queue_.TakeSent(sent->request.request_id()), nullptr);
  EXPECT_EQ(Send(), later);
}

TEST_F(AttendQueueTest, ACallMayBeDueBeforeOneThatCameEarlier) {
  const CallPtr slow = Add({1}, seconds(9));
  const CallPtr quick = Add({2}, seconds(1));
  ASSERT_EQ(Send(), slow);
  EXPECT_EQ(queue_.NextEvent(now_), now_ + seconds(1));
  now_ += seconds(1);
  const AttendQueue::Ended overdue = queue_.TakeEnded(now_);
  EXPECT_TRUE(overdue.sent.empty());
  EXPECT_EQ(overdue.unsent, std::vector<CallPtr>{quick});
  EXPECT_EQ(queue_.NextEvent(now_), now_ + seconds(8));
}

TEST_F(AttendQueueTest, CancelledCallsLeaveWhereverTheyAre) {
  const CallPtr sent = Add({1});
  const CallPtr waiting = Add({1});
  const CallPtr other = Add({2});
  ASSERT_EQ(Send(), sent);
  EXPECT_TRUE(queue_.Cancel(sent->request.request_id()));
  EXPECT_TRUE(queue_.Cancel(waiting->request.request_id()));
  EXPECT_FALSE(queue_.Cancel(77));
  const AttendQueue::Ended ended = queue_.TakeEnded(now_);
  EXPECT_EQ(ended.sent, std::vector<CallPtr>{sent});
  EXPECT_EQ(ended.unsent, std::vector<CallPtr>{waiting});
  EXPECT_EQ(Send(), other);
}

TEST_F(AttendQueueTest, ConnectingInVainCountsForAllThatWaitForIt) {
  AttendQueue queue(2, LeastDelay);
  std::vector<CallPtr> calls;
  for (uint64_t id = 1; id <= 3; ++id) {
    auto call = std::make_shared<PendingCall>();
    call->call.entries.push_back({id, 0, 1, 1});
    call->deadline = now_ + seconds(30);
    call->placed = id != 3;
    queue.Add(call);
    calls.push_back(call);
  }
  EXPECT_TRUE(queue.FailWaiting(kUnavailable, now_).empty());
  EXPECT_EQ(queue.NextToSend(now_), nullptr);
  now_ += milliseconds(50);
  const std::vector<CallPtr> final = queue.FailWaiting(kUnavailable, now_);
  EXPECT_EQ(final, (std::vector<CallPtr>{calls[0], calls[1]}));
  EXPECT_EQ(calls[2]->failures, 0) << "its tensors are not placed: it waits for something else";
}

TEST_F(AttendQueueTest, UnplacedCallsKeepTheirPlaceInTheOrder) {
  const CallPtr a = Add({1});
  a->placed = false;
  const CallPtr b = Add({1});
  EXPECT_EQ(Send(), nullptr);
  EXPECT_EQ(queue_.NextToPlace(now_), a);
  a->placed = true;
  EXPECT_EQ(queue_.NextToPlace(now_), nullptr);
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), b);
}

TEST_F(AttendQueueTest, RepeatsOfABrokenStreamKeepTheOrder) {
  const CallPtr a = Add({1});
  const CallPtr b = Add({1});
  ASSERT_EQ(Send(), a);
  ASSERT_EQ(Send(), b);
  for (const CallPtr& call : queue_.TakeAllSent()) {
    EXPECT_TRUE(queue_.Repeat(call, kUnavailable, now_));
  }
  now_ += seconds(1);
  EXPECT_EQ(Send(), a);
  EXPECT_EQ(Send(), b);
}

}  // namespace
}  // namespace tributary::client
