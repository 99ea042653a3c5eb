// The coordinator's end of the protocol, against workers by hand: who is refused and why, what is
// fenced, what breaks a group and what does not, who comes back as whom.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/fake_worker.h"
#include "tests/fault/group_harness.h"

namespace tributary::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Message = v1::CoordinatorMessage;

worker::Command DropCache(uint64_t epoch, uint64_t number, milliseconds timeout = seconds(10)) {
  worker::Command command{.epoch = epoch, .number = number, .cache = 1};
  command.deadline = std::chrono::steady_clock::now() + timeout;
  command.body = worker::DropCacheCommand{};
  return command;
}

class SessionTest : public ::testing::Test {
 protected:
  void Serve(int size) { harness_.emplace(GroupHarness::Options(size)); }
  std::unique_ptr<FakeWorker> Dial() { return std::make_unique<FakeWorker>(harness_->address()); }
  std::future<service::Outcome> Begin(const worker::Command& command) {
    return std::async(std::launch::async, [this, command] { return harness_->Execute(command); });
  }
  // Two workers, instances 1 and 2, in a group of epoch 1.
  void ServeTwo() {
    Serve(2);
    for (int rank = 0; rank < 2; ++rank) {
      workers_.push_back(Dial());
      workers_.back()->Register(static_cast<uint64_t>(rank) + 1, rank);
    }
    Form(1);
    ASSERT_EQ(harness_->WaitFormed(0).epoch, 1u);
    WaitHeld();
  }
  // Until the group counts on what its workers hold, which is after the observer has returned.
  void WaitHeld() {
    ASSERT_TRUE(Eventually(seconds(10), [&] {
      for (const service::Member& member : harness_->group().members()) {
        if (!member.holds_shard) return false;
      }
      return true;
    }));
  }
  // Every worker is told to form `epoch` and does.
  void Form(uint64_t epoch) {
    for (const auto& worker : workers_) {
      ASSERT_EQ(worker->Next(Message::kConfigure).epoch(), epoch);
      worker->SendReady(epoch);
    }
  }

  std::optional<GroupHarness> harness_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;  // by rank
};

// ---- joining -----------------------------------------------------------------------------------

struct Refusal {
  const char* field;
  std::function<void(v1::WorkerMessage*)> spoil;
};

class Refused : public SessionTest, public ::testing::WithParamInterface<Refusal> {};

TEST_P(Refused, WithTheFieldNamed) {
  Serve(2);
  const auto worker = Dial();
  worker->Register(1, 0, GetParam().spoil);
  EXPECT_EQ(worker->Next(Message::kWelcome).body_case(), Message::BODY_NOT_SET);
  const grpc::Status status = worker->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_EQ(FakeWorker::FieldOf(status), GetParam().field) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr(GetParam().field));
}

INSTANTIATE_TEST_SUITE_P(
    Reasons, Refused,
    ::testing::Values(
        Refusal{"protocol_version",
                [](auto* m) { m->mutable_registration()->set_protocol_version(1'000); }},
        Refusal{"backend", [](auto* m) { m->mutable_registration()->set_backend("abacus"); }},
        Refusal{"world_size", [](auto* m) { m->mutable_registration()->set_world_size(3); }},
        Refusal{"rank", [](auto* m) { m->mutable_registration()->set_rank(2); }},
        Refusal{"epoch", [](auto* m) { m->set_epoch(9); }},
        Refusal{"epoch", [](auto* m) { m->mutable_registration()->set_group_id(12345); }}));

TEST_F(SessionTest, ARankIsHeldByOneLiveWorker) {
  Serve(2);
  const auto first = Dial();
  first->Register(1, 0);
  ASSERT_EQ(first->Next(Message::kWelcome).welcome().rank(), 0);

  const auto second = Dial();
  second->Register(2, 0);
  const grpc::Status refused = second->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(FakeWorker::FieldOf(refused), "rank");

  first->Finish();
  ASSERT_TRUE(Eventually(seconds(10), [&] { return !harness_->group().members()[0].connected; }));
  const auto third = Dial();
  third->Register(2, 0);
  EXPECT_EQ(third->Next(Message::kWelcome).welcome().rank(), 0);
}

TEST_F(SessionTest, AWorkerThatDialsAgainReplacesItself) {
  ServeTwo();
  const auto again = Dial();
  again->Register(2, 1);
  EXPECT_EQ(again->Next(Message::kWelcome).welcome().rank(), 1);
  EXPECT_FALSE(workers_[1]->Finish().ok());
  ASSERT_EQ(workers_[0]->Next(Message::kConfigure).epoch(), 2u);
  ASSERT_EQ(again->Next(Message::kConfigure).epoch(), 2u);
  workers_[0]->SendReady(2);
  again->SendReady(2);
  EXPECT_THAT(harness_->WaitFormed(1).fresh, ElementsAre(false, false));
}

TEST_F(SessionTest, WhoComesBackKeepsItsPlaceAndItsShard) {
  ServeTwo();
  workers_[1]->Finish();
  ASSERT_TRUE(harness_->WaitBroken(1));
  workers_[1] = Dial();
  workers_[1]->Register(2, /*rank=*/-1);
  EXPECT_EQ(workers_[1]->Next(Message::kWelcome).welcome().rank(), 1);
  for (const auto& worker : workers_) {
    const Message configure = worker->Next(Message::kConfigure);
    EXPECT_EQ(configure.epoch(), 2u);
    EXPECT_FALSE(configure.configure().fresh());
    worker->SendReady(2);
  }
  EXPECT_THAT(harness_->WaitFormed(1).fresh, ElementsAre(false, false));
}

TEST_F(SessionTest, ANewcomerIsFreshAndSoIsWhoComesBackAfterIt) {
  ServeTwo();
  workers_[1]->Finish();
  ASSERT_TRUE(harness_->WaitBroken(1));
  workers_[1] = Dial();
  workers_[1]->Register(99, 1);
  Form(2);
  EXPECT_THAT(harness_->WaitFormed(1).fresh, ElementsAre(false, true));
  WaitHeld();

  // The first holder missed what happened in epoch 2.
  workers_[1]->Finish();
  ASSERT_TRUE(harness_->WaitBroken(2));
  workers_[1] = Dial();
  workers_[1]->Register(2, 1);
  const Message configure = workers_[1]->Next(Message::kConfigure);
  EXPECT_TRUE(configure.configure().fresh());
}

// ---- forming -----------------------------------------------------------------------------------

TEST_F(SessionTest, RanksMeetThroughTheRendezvousOfTheirEpoch) {
  Serve(2);
  workers_.push_back(Dial());
  workers_.push_back(Dial());
  workers_[0]->Register(1, 0);
  workers_[1]->Register(2, 1);
  for (const auto& worker : workers_) ASSERT_EQ(worker->Next(Message::kConfigure).epoch(), 1u);
  // Asked for before it is there; and put by somebody who is still in another epoch.
  workers_[1]->Send(1, [](auto* m) { m->mutable_rendezvous_get()->set_key("address"); });
  workers_[0]->Send(0, [](auto* m) {
    m->mutable_rendezvous_put()->set_key("address");
    m->mutable_rendezvous_put()->set_value("old");
  });
  workers_[0]->Send(1, [](auto* m) {
    m->mutable_rendezvous_put()->set_key("address");
    m->mutable_rendezvous_put()->set_value("new");
  });
  const Message value = workers_[1]->Next(Message::kRendezvousValue);
  EXPECT_EQ(value.epoch(), 1u);
  EXPECT_EQ(value.rendezvous_value().key(), "address");
  EXPECT_EQ(value.rendezvous_value().value(), "new");
  workers_[0]->Send(1, [](auto* m) { m->mutable_rendezvous_get()->set_key("address"); });
  EXPECT_EQ(workers_[0]->Next(Message::kRendezvousValue).rendezvous_value().value(), "new");
}

TEST_F(SessionTest, AFormationThatFailsIsRepeatedUnderTheNextEpoch) {
  Serve(2);
  workers_.push_back(Dial());
  workers_.push_back(Dial());
  workers_[0]->Register(1, 0);
  workers_[1]->Register(2, 1);
  ASSERT_EQ(workers_[0]->Next(Message::kConfigure).epoch(), 1u);
  ASSERT_EQ(workers_[1]->Next(Message::kConfigure).epoch(), 1u);
  workers_[0]->SendReady(1);
  workers_[1]->Send(1, [](auto* m) {
    m->mutable_form_failed()->mutable_status()->set_code(4);
    m->mutable_form_failed()->mutable_status()->set_message("rank 0 does not answer");
  });
  EXPECT_THAT(workers_[0]->Next(Message::kAbort).abort().reason(),
              HasSubstr("rank 0 does not answer"));
  for (const auto& worker : workers_) {
    const Message configure = worker->Next(Message::kConfigure);
    EXPECT_EQ(configure.epoch(), 2u);
    EXPECT_TRUE(configure.configure().fresh());  // nobody ever held anything
    worker->SendReady(2);
  }
  EXPECT_EQ(harness_->WaitFormed(0).epoch, 2u);
  EXPECT_THAT(harness_->broken(), IsEmpty());  // it never worked
}

// A peer of a worker that died may say so before the dead worker's stream has ended.
TEST_F(SessionTest, NoEpochIsBegunBeforeEveryRankHasLeftTheLast) {
  ServeTwo();
  workers_[1]->StayInEpoch();
  auto outcome = Begin(DropCache(1, 1));
  workers_[0]->Next(Message::kCommand);
  workers_[0]->SendReply(1, 1, 0, /*code=*/10);
  EXPECT_EQ(outcome.get().status.code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(harness_->WaitBroken(1));
  EXPECT_EQ(workers_[0]->Next(Message::kAbort).epoch(), 1u);

  // Its seat is given to another instance, and one epoch is all that the change takes.
  workers_[1] = Dial();
  ASSERT_TRUE(Eventually(seconds(10), [&] { return !harness_->group().members()[1].connected; }));
  workers_[1]->Register(99, 1);
  Form(2);
  EXPECT_THAT(harness_->WaitFormed(1).fresh, ElementsAre(false, true));
}

TEST_F(SessionTest, WhoDoesNotLeaveTheEpochLosesItsSeat) {
  service::RemoteGroupOptions options = GroupHarness::Options(2);
  options.form_timeout = milliseconds(1'000);
  options.heartbeat_timeout = seconds(15);
  harness_.emplace(options);
  for (int rank = 0; rank < 2; ++rank) {
    workers_.push_back(Dial());
    workers_.back()->Register(static_cast<uint64_t>(rank) + 1, rank);
  }
  Form(1);
  ASSERT_EQ(harness_->WaitFormed(0).epoch, 1u);
  WaitHeld();
  workers_[1]->StayInEpoch();
  auto outcome = Begin(DropCache(1, 1));
  workers_[0]->Next(Message::kCommand);
  workers_[0]->SendReply(1, 1, 0, /*code=*/10);
  EXPECT_EQ(outcome.get().status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Eventually(seconds(10), [&] { return !harness_->group().members()[1].connected; }));
  EXPECT_TRUE(harness_->group().members()[0].connected);
}

TEST_F(SessionTest, AReadyOfAnotherEpochIsNotHeard) {
  Serve(1);
  const auto worker = Dial();
  worker->Register(1, 0);
  ASSERT_EQ(worker->Next(Message::kConfigure).epoch(), 1u);
  worker->SendReady(0);
  worker->SendReady(2);
  EXPECT_EQ(harness_->WaitFormed(0, milliseconds(200)).epoch, 0u);
  worker->SendReady(1);
  EXPECT_EQ(harness_->WaitFormed(0).epoch, 1u);
}

// ---- after a restart of the coordinator
// ----------------------------------------------------------

// A group of an earlier life, whose ranks instances 1 and 2 held.
service::RemoteGroupOptions OfAnEarlierLife(milliseconds holders_return) {
  service::RemoteGroupOptions options = GroupHarness::Options(2);
  options.identity = {.group_id = 77, .epoch = 5, .formed_epoch = 5, .holders = {1, 2}};
  options.holders_return = holders_return;
  return options;
}

TEST_F(SessionTest, RanksAreKeptForThoseThatHeldThem) {
  harness_.emplace(OfAnEarlierLife(seconds(60)));
  const auto stranger = Dial();
  stranger->Register(9, -1);
  const grpc::Status refused = stranger->Finish();
  EXPECT_EQ(FakeWorker::FieldOf(refused), "rank");
  EXPECT_THAT(refused.error_message(), HasSubstr("kept for a while"));
  for (const uint64_t instance : {2, 1}) {
    workers_.push_back(Dial());
    workers_.back()->Register(instance, -1);
    const auto welcome = workers_.back()->Next(Message::kWelcome).welcome();
    EXPECT_EQ(welcome.rank(), static_cast<int>(instance) - 1);
    EXPECT_TRUE(welcome.report_holdings());
  }
}

TEST_F(SessionTest, RanksWhoseHoldersDoNotComeAreGivenAway) {
  harness_.emplace(OfAnEarlierLife(milliseconds(200)));
  workers_.push_back(Dial());
  workers_.back()->Register(1, -1);
  EXPECT_EQ(workers_.back()->Next(Message::kWelcome).welcome().rank(), 0);
  ASSERT_TRUE(Eventually(seconds(10), [&] {
    auto stranger = Dial();
    stranger->Register(9, -1);
    const Message welcome = stranger->Next(Message::kWelcome);
    if (!welcome.has_welcome()) return false;
    EXPECT_EQ(welcome.welcome().rank(), 1);
    workers_.push_back(std::move(stranger));
    return true;
  }));
}

// As long as no group has been formed, a place that was taken meanwhile is given back.
TEST_F(SessionTest, AHolderThatComesLateGetsItsRankBack) {
  harness_.emplace(OfAnEarlierLife(milliseconds(0)));
  const auto stranger = Dial();
  stranger->Register(9, 1);
  EXPECT_EQ(stranger->Next(Message::kWelcome).welcome().rank(), 1);
  workers_.push_back(Dial());
  workers_.back()->Register(2, 1);
  const auto welcome = workers_.back()->Next(Message::kWelcome).welcome();
  EXPECT_EQ(welcome.rank(), 1);
  EXPECT_TRUE(welcome.report_holdings());
  EXPECT_FALSE(stranger->Next(Message::kConfigure).has_configure());
  EXPECT_EQ(stranger->Finish().error_code(), grpc::StatusCode::ABORTED);
}

// ---- commands ----------------------------------------------------------------------------------

TEST_F(SessionTest, RepliesOfAnotherEpochOrNumberAreNotHeard) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 5));
  for (int rank = 0; rank < 2; ++rank) {
    const Message command = workers_[static_cast<size_t>(rank)]->Next(Message::kCommand);
    EXPECT_EQ(command.epoch(), 1u);
    EXPECT_EQ(command.command().number(), 5u);
    auto& worker = *workers_[static_cast<size_t>(rank)];
    worker.SendReply(0, 5, rank, /*code=*/13);
    worker.SendReply(1, 4, rank, /*code=*/13);
    worker.SendReply(1, 5, rank);
  }
  const service::Outcome got = outcome.get();
  EXPECT_EQ(got.status, absl::OkStatus());
  ASSERT_EQ(got.replies.size(), 2u);
  EXPECT_EQ(got.replies[1].rank, 1);
  EXPECT_THAT(harness_->broken(), IsEmpty());
}

TEST_F(SessionTest, ACommandOfAnEpochGoneByIsAbortedAtOnce) {
  ServeTwo();
  EXPECT_EQ(harness_->Execute(DropCache(0, 1)).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(harness_->Execute(DropCache(2, 1)).status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(harness_->broken(), IsEmpty());
}

// A worker that could not send it would lose its stream, and the group with it.
TEST_F(SessionTest, AStepWhoseResultIsBeyondAMessageIsRefused) {
  service::RemoteGroupOptions options = GroupHarness::Options(1);
  options.max_message_bytes = size_t{1} << 20;
  harness_.emplace(options);
  workers_.push_back(Dial());
  workers_.back()->Register(1, 0);
  Form(1);
  ASSERT_EQ(harness_->WaitFormed(0).epoch, 1u);
  WaitHeld();
  const std::vector<std::byte> q(size_t{600} << 10);  // bf16: the result is twice that
  worker::Command command = DropCache(1, 1);
  worker::StepCommand step;
  step.q = {.data = q.data(), .dtype = DType::kBf16, .bytes = q.size()};
  command.body = step;
  const service::Outcome refused = harness_->Execute(command);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("result"));
  EXPECT_THAT(harness_->broken(), IsEmpty());
  EXPECT_TRUE(harness_->group().members()[0].connected);
}

TEST_F(SessionTest, ARefusalByAllRanksBreaksNothing) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 1));
  for (int rank = 0; rank < 2; ++rank) {
    workers_[static_cast<size_t>(rank)]->Next(Message::kCommand);
    workers_[static_cast<size_t>(rank)]->SendReply(1, 1, rank, /*code=*/3);
  }
  EXPECT_EQ(outcome.get().status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(harness_->broken(), IsEmpty());
}

TEST_F(SessionTest, AnAbortedReplyBreaksTheGroupAndItFormsAgain) {
  ServeTwo();
  auto first = Begin(DropCache(1, 1));
  for (const auto& worker : workers_) worker->Next(Message::kCommand);
  auto second = Begin(DropCache(1, 2));  // in flight behind it
  for (const auto& worker : workers_) worker->Next(Message::kCommand);
  workers_[0]->SendReply(1, 1, 0);
  workers_[1]->SendReply(1, 1, 1, /*code=*/10);
  EXPECT_EQ(first.get().status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(second.get().status.code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(harness_->WaitBroken(1));
  for (const auto& worker : workers_) EXPECT_EQ(worker->Next(Message::kAbort).epoch(), 1u);
  Form(2);
  const GroupHarness::Formed formed = harness_->WaitFormed(1);
  EXPECT_EQ(formed.epoch, 2u);
  EXPECT_THAT(formed.fresh, ElementsAre(false, false));
}

TEST_F(SessionTest, AMissedDeadlineBreaksTheGroupAndNamesTheRank) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 1, milliseconds(300)));
  workers_[0]->Next(Message::kCommand);
  workers_[0]->SendReply(1, 1, 0);
  EXPECT_EQ(outcome.get().status.code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(harness_->WaitBroken(1));
  EXPECT_THAT(harness_->broken()[0], HasSubstr("rank 1"));
  workers_[1]->SendReply(1, 1, 1);  // late: the epoch is over
  Form(2);
  EXPECT_EQ(harness_->WaitFormed(1).epoch, 2u);
}

TEST_F(SessionTest, SilenceBreaksTheGroup) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 1, seconds(20)));
  // Neither says a word from now on; the deadline is far.
  EXPECT_EQ(outcome.get().status.code(), absl::StatusCode::kAborted);
  ASSERT_TRUE(harness_->WaitBroken(1));
  EXPECT_THAT(harness_->broken()[0], HasSubstr("silent"));
  ASSERT_TRUE(Eventually(seconds(10), [&] {
    const std::vector<service::Member> members = harness_->group().members();
    return !members[0].connected && !members[1].connected;
  }));
  EXPECT_FALSE(workers_[0]->Finish().ok());
  EXPECT_FALSE(workers_[1]->Finish().ok());
}

TEST_F(SessionTest, ACommandTooLargeBreaksNothing) {
  service::RemoteGroupOptions options = GroupHarness::Options(1);
  options.max_message_bytes = 4'096;
  harness_.emplace(options);
  const auto worker = Dial();
  ASSERT_EQ(worker->Join(1, 0), 1u);
  ASSERT_EQ(harness_->WaitFormed(0).epoch, 1u);
  const std::vector<std::byte> large(8'192);
  worker::Command command = DropCache(1, 1);
  worker::StepCommand step;
  step.q = {large.data(), DType::kF32, large.size()};
  command.body = step;
  EXPECT_EQ(harness_->Execute(command).status.code(), absl::StatusCode::kResourceExhausted);
  auto outcome = Begin(DropCache(1, 2));
  worker->Next(Message::kCommand);
  worker->SendReply(1, 2, 0);
  EXPECT_EQ(outcome.get().status, absl::OkStatus());
  EXPECT_THAT(harness_->broken(), IsEmpty());
}

// ---- leaving -----------------------------------------------------------------------------------

TEST_F(SessionTest, WhoDrainsIsLetGoAfterWhatIsInFlight) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 1));
  for (const auto& worker : workers_) worker->Next(Message::kCommand);
  workers_[1]->Send(1, [](auto* m) { m->mutable_drain(); });
  workers_[1]->Send(1, [](auto* m) { m->mutable_heartbeat()->set_memory_bytes(42); });
  ASSERT_TRUE(
      Eventually(seconds(5), [&] { return harness_->group().members()[1].memory_bytes == 42; }));
  // Nothing new is begun while somebody waits to leave.
  EXPECT_EQ(harness_->Execute(DropCache(1, 2)).status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(harness_->broken(), IsEmpty());
  workers_[0]->SendReply(1, 1, 0);
  workers_[1]->SendReply(1, 1, 1);
  EXPECT_EQ(outcome.get().status, absl::OkStatus());
  EXPECT_EQ(workers_[1]->Next(Message::kBye).body_case(), Message::kBye);
  EXPECT_TRUE(workers_[1]->Finish().ok());
  ASSERT_TRUE(harness_->WaitBroken(1));
  EXPECT_THAT(harness_->broken()[0], HasSubstr("leaving"));
}

TEST_F(SessionTest, WhoDrainsWithoutASeatHoldsNobodyUp) {
  ServeTwo();
  auto outcome = Begin(DropCache(1, 1));
  for (const auto& worker : workers_) worker->Next(Message::kCommand);
  const auto standby = Dial();
  standby->Send(0, [](auto* m) { m->mutable_drain(); });
  EXPECT_EQ(standby->Next(Message::kBye).body_case(), Message::kBye);
  EXPECT_TRUE(standby->Finish().ok());
  auto second = Begin(DropCache(1, 2));
  for (const auto& worker : workers_) worker->Next(Message::kCommand);
  for (int rank = 0; rank < 2; ++rank) {
    for (const uint64_t number : {1, 2}) {
      workers_[static_cast<size_t>(rank)]->SendReply(1, number, rank);
    }
  }
  EXPECT_EQ(outcome.get().status, absl::OkStatus());
  EXPECT_EQ(second.get().status, absl::OkStatus());
  EXPECT_THAT(harness_->broken(), IsEmpty());
}

TEST_F(SessionTest, StopSaysGoodbye) {
  ServeTwo();
  std::thread stop([&] { harness_->group().Stop(); });
  for (const auto& worker : workers_) {
    EXPECT_EQ(worker->Next(Message::kBye).body_case(), Message::kBye);
    EXPECT_TRUE(worker->Finish().ok());
  }
  stop.join();
  EXPECT_EQ(harness_->Execute(DropCache(1, 9)).status.code(), absl::StatusCode::kAborted);
}

// A worker that does not read (it is stopped, say) holds nobody up.
TEST_F(SessionTest, StopDoesNotWaitForTheDeaf) {
  ServeTwo();
  for (const auto& worker : workers_) worker->StopReading();
  harness_->group().Stop();
}

}  // namespace
}  // namespace tributary::test
