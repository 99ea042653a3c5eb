// Sessions whose mailbox lies on a GPU, as the coordinator sees them: how they are opened, what the
// ranks are told, and what their news settle. The GPUs are a fake group's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mailbox/layout.h"
#include "service/data/mailbox_handout.h"
#include "service/data/session_terms.h"
#include "service/data/waiting_choice.h"
#include "tests/service/fake_group.h"
#include "tests/service/session_driver.h"
#include "tests/service/test_service.h"
#include "worker/rpc/protocol.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::ProbeResult Times(double memory_ops, double spinning) {
  v1::ProbeResult times;
  times.set_memory_ops_seconds(memory_ops);
  times.set_spinning_seconds(spinning);
  return times;
}

// ---- the choice ---------------------------------------------------------------------------------

TEST(WaitingChoice, WarpsSpinWhereTheyMeet) {
  for (const bool one_gpu : {true, false}) {
    const WaitingChoice choice = ChooseWaiting(Times(13.6e-6, 3.4e-6), one_gpu);
    EXPECT_EQ(choice.waiting, worker::Waiting::kSpinningWarp);
    EXPECT_EQ(choice.round_trip_seconds, 3.4e-6);
    EXPECT_THAT(choice.warning, IsEmpty());
  }
  // A little faster is not worth two launches per layer.
  EXPECT_EQ(ChooseWaiting(Times(4e-6, 5e-6), true).waiting, worker::Waiting::kSpinningWarp);
}

TEST(WaitingChoice, StreamsWaitWhereProcessesTakeTurns) {
  const WaitingChoice choice = ChooseWaiting(Times(13.6e-6, 4.5e-3), true);
  EXPECT_EQ(choice.waiting, worker::Waiting::kStreamMemoryOps);
  EXPECT_EQ(choice.round_trip_seconds, 13.6e-6);
  EXPECT_THAT(choice.warning, HasSubstr("MPS"));
  EXPECT_THAT(choice.warning, HasSubstr("13.6 us"));
}

TEST(WaitingChoice, WhatWasNotTimedIsNotChosen) {
  EXPECT_EQ(ChooseWaiting(Times(0, 4.5e-3), true).waiting, worker::Waiting::kSpinningWarp);
  EXPECT_THAT(ChooseWaiting(Times(0, 4.5e-3), true).warning, HasSubstr("MPS"));
  EXPECT_EQ(ChooseWaiting(Times(13e-6, 0), false).waiting, worker::Waiting::kStreamMemoryOps);
  const WaitingChoice neither = ChooseWaiting(Times(0, 0), true);
  EXPECT_EQ(neither.waiting, worker::Waiting::kSpinningWarp);
  EXPECT_EQ(neither.round_trip_seconds, 0);
  // What a host says is not trusted to be a time.
  for (const double odd :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(ChooseWaiting(Times(odd, odd), true).round_trip_seconds, 0);
    EXPECT_EQ(ChooseWaiting(Times(odd, 3e-6), true).waiting, worker::Waiting::kSpinningWarp);
  }
}

// ---- sessions -----------------------------------------------------------------------------------

class DeviceSessionTest : public ::testing::Test {
 protected:
  void Begin(TestService::Options options = {}, int ranks = 1) {
    group_ = new FakeGroup(ranks, /*record=*/true, worker::Device::kCuda);
    service_.emplace(std::move(options), std::unique_ptr<WorkerGroup>(group_));
    ASSERT_TRUE(CreateCache(service_->stub(), "m", SmallSpec()).ok());
    ASSERT_TRUE(tributary::service::testing::Open(service_->stub(), "m", 1).ok());
  }

  static v1::OpenSession DeviceOpen(bool measures = true) {
    v1::OpenSession open = MessagesSession(8);
    open.set_memory(v1::SESSION_MEMORY_DEVICE);
    open.set_device_uuid("GPU-0");
    open.set_measures(measures);
    return open;
  }

  static v1::SessionRequest JoinOf(const v1::SessionOpened& opened, int32_t endpoint) {
    v1::SessionRequest request;
    request.mutable_join()->set_session_id(opened.session_id());
    request.mutable_join()->set_secret(opened.endpoint_secret());
    request.mutable_join()->set_endpoint(endpoint);
    return request;
  }

  // One new token, and a query row for it, through both layers.
  static v1::SubmitStep StepAt(uint64_t step_id, int64_t position) {
    v1::SubmitStep step;
    step.set_step_id(step_id);
    step.set_mode(v1::ATTEND_MODE_CAUSAL);
    step.set_layers(2);
    v1::SessionStepEntry* entry = step.add_entries();
    entry->set_sequence_id(1);
    entry->set_first_position(position);
    entry->set_query_rows(1);
    entry->set_new_tokens(1);
    return step;
  }

  // The last command of its kind.
  template <typename Body>
  std::optional<Body> Last() const {
    std::optional<Body> last;
    for (const auto& command : group_->commands()) {
      if (const auto* body = std::get_if<Body>(&command->body)) last = *body;
    }
    return last;
  }

  // All commands of steps, in order.
  std::vector<worker::SessionStepCommand> StepCommands() const {
    std::vector<worker::SessionStepCommand> steps;
    for (const auto& command : group_->commands()) {
      const auto* step = std::get_if<worker::SessionStepCommand>(&command->body);
      if (step != nullptr) steps.push_back(*step);
    }
    return steps;
  }
  bool AwaitStepCommands(size_t count) {
    return test::Eventually(std::chrono::seconds(60),
                            [&] { return StepCommands().size() == count; });
  }

  int64_t Length() { return service_->Topology().caches(0).sequence(0).length(); }

  FakeGroup* group_ = nullptr;  // the service's
  std::optional<TestService> service_;
};

TEST_F(DeviceSessionTest, TheHostTimesRoundTripsAndTheServiceChooses) {
  Begin();
  const v1::ProbeResult times = Times(13e-6, 4.5e-3);
  SessionDriver session(service_->stub(), DeviceOpen(), &times);
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  EXPECT_TRUE(session.was_probed());
  EXPECT_EQ(session.opened().waiting(), v1::WAITING_STREAM_MEMORY_OPS);
  EXPECT_EQ(session.opened().round_trip_seconds(), 13e-6);
  EXPECT_THAT(session.opened().warning(), HasSubstr("MPS"));
  EXPECT_EQ(session.opened().device().device_uuid(), "GPU-0");
  EXPECT_TRUE(Last<worker::OpenSessionCommand>()->measures);
  // Ranks are told with each step.
  session.Submit(StepAt(1, 0));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  // The host may hear that its step was accepted before the ranks hear of the step.
  ASSERT_TRUE(test::Eventually(std::chrono::seconds(60),
                               [&] { return Last<worker::SessionStepCommand>().has_value(); }));
  EXPECT_EQ(Last<worker::SessionStepCommand>()->waiting, worker::Waiting::kStreamMemoryOps);
  group_->Tell({.session = session.opened().session_id(), .ended = 2});
  EXPECT_FALSE(session.ReadEnded().has_status());

  const v1::GetTopologyReply topology = service_->Topology();
  ASSERT_EQ(topology.sessions_size(), 1);
  const v1::SessionInfo& info = topology.sessions(0);
  EXPECT_EQ(info.session_id(), session.opened().session_id());
  EXPECT_EQ(info.cache_id(), "m");
  EXPECT_EQ(info.memory(), v1::SESSION_MEMORY_DEVICE);
  EXPECT_EQ(info.waiting(), v1::WAITING_STREAM_MEMORY_OPS);
  EXPECT_EQ(info.round_trip_seconds(), 13e-6);
  EXPECT_EQ(info.warning(), session.opened().warning());
  EXPECT_GT(info.mailbox_bytes(), 0u);
  EXPECT_EQ(info.steps_in_flight(), 0);
  EXPECT_EQ(info.steps_done(), 1u);
  EXPECT_EQ(info.layers_done(), 2u);
  session.SendClose();
  EXPECT_TRUE(session.Finish().ok());
  EXPECT_EQ(service_->Topology().sessions_size(), 0);
}

TEST_F(DeviceSessionTest, AHostThatDoesNotMeasureIsNotAsked) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  EXPECT_EQ(session.opened().waiting(), v1::WAITING_SPINNING_WARP);
  EXPECT_EQ(session.opened().round_trip_seconds(), 0);
  session.SendTimes(Times(1e-6, 1e-6));  // unbidden
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(status), "probed");
}

TEST_F(DeviceSessionTest, AHostThatDoesNotAnswerLosesItsSession) {
  TestService::Options options;
  options.coordinator.session_limits.probe_patience = std::chrono::milliseconds(50);
  Begin(std::move(options));
  SessionDriver session(service_->stub(), DeviceOpen());
  EXPECT_TRUE(session.was_probed());
  EXPECT_EQ(session.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Last<worker::CloseSessionCommand>().has_value());
}

TEST_F(DeviceSessionTest, AStepBeforeTheAnswerEndsTheSession) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen());
  session.Submit(StepAt(1, 0));
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(status), "submit");
  EXPECT_TRUE(Last<worker::CloseSessionCommand>().has_value());
  EXPECT_EQ(Length(), 0);
}

TEST_F(DeviceSessionTest, OnlySessionsOnGpusMeasure) {
  Begin();
  v1::OpenSession open = MessagesSession(8);
  open.set_measures(true);
  SessionDriver session(service_->stub(), open);
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(status), "open.measures");
}

TEST_F(DeviceSessionTest, OneEndpointOnAGpuMayHandOverInParts) {
  Begin();
  for (const int32_t endpoints : {0, 1, 2}) {
    v1::OpenSession open = DeviceOpen(/*measures=*/false);
    open.set_hands_over_in_parts(endpoints > 0);
    if (endpoints > 0) open.set_endpoints(endpoints);
    SessionDriver session(service_->stub(), open);
    ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
    EXPECT_EQ(session.opened().layout().begun() != 0, endpoints == 1) << endpoints;
    EXPECT_EQ(Last<worker::OpenSessionCommand>()->layout.begun, session.opened().layout().begun());
  }
  v1::OpenSession open = MessagesSession(8);
  open.set_hands_over_in_parts(true);
  SessionDriver session(service_->stub(), open);
  EXPECT_EQ(FieldOf(session.Finish()), "open.hands_over_in_parts");
}

TEST_F(DeviceSessionTest, AMailboxOnAnotherMachineIsRefused) {
  Begin();
  group_->LieElsewhere();
  SessionDriver session(service_->stub(), DeviceOpen());
  EXPECT_FALSE(session.is_open());
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(FieldOf(status), "open.memory");
  EXPECT_TRUE(Last<worker::CloseSessionCommand>().has_value());
}

TEST_F(DeviceSessionTest, AStepIsSettledWhenAllRanksAreThrough) {
  Begin({}, /*ranks=*/3);
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  const uint64_t id = session.opened().session_id();
  session.Submit(StepAt(1, 0));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  session.Submit(StepAt(2, 1));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  group_->Tell({.session = id, .rank = 2, .ended = 2});
  group_->Tell({.session = id, .rank = 0, .ended = 4});
  group_->Tell({.session = id, .rank = 1, .ended = 2});
  EXPECT_EQ(session.ReadEnded().step_id(), 1u);
  EXPECT_EQ(Length(), 2);  // as accepted
  // What one rank did not carry out is not done, wherever the others are.
  group_->Tell({.session = id, .rank = 2, .ended = 4});
  group_->Tell({.session = id,
                .rank = 1,
                .ended = 3,
                .status = absl::DeadlineExceededError("the host is silent")});
  const v1::StepEnded ended = session.ReadEnded();
  EXPECT_EQ(ended.step_id(), 2u);
  EXPECT_EQ(ended.status().code(), static_cast<int>(StatusCode::DEADLINE_EXCEEDED));
  EXPECT_EQ(ended.layers_done(), 1);
  EXPECT_EQ(session.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Length(), 1);
}

TEST_F(DeviceSessionTest, ConflictsOfAnyRankAreTold) {
  Begin({}, /*ranks=*/2);
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  const uint64_t id = session.opened().session_id();
  for (const uint64_t step : {1, 2}) {  // the second repeats the first
    session.Submit(StepAt(step, 0));
    const v1::StepAccepted accepted = session.ReadAccepted();
    ASSERT_FALSE(accepted.has_status()) << accepted.status().message();
    const auto end = static_cast<uint32_t>(2 * step);
    group_->Tell({.session = id, .rank = 0, .ended = end});
    worker::SessionNews news{.session = id, .rank = 1, .ended = end};
    if (step == 2) news.conflicts.emplace_back(2, 0);
    group_->Tell(news);
    EXPECT_EQ(session.ReadEnded().status().code(),
              step == 1 ? 0 : static_cast<int>(StatusCode::ALREADY_EXISTS));
  }
}

// Each piece of each layer is a command, and a few of them are with the workers at a time.
TEST_F(DeviceSessionTest, AStepLargerThanASlotGoesInPieces) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  const uint64_t id = session.opened().session_id();
  v1::SubmitStep step = StepAt(1, 0);
  step.mutable_entries(0)->set_query_rows(20);
  step.mutable_entries(0)->set_new_tokens(20);
  session.Submit(step);
  ASSERT_FALSE(session.ReadAccepted().has_status());
  ASSERT_TRUE(AwaitStepCommands(kCommandsAhead));
  session.Submit(StepAt(2, 20));  // its turn comes when the step before has been sent
  const v1::StepAccepted next = session.ReadAccepted();
  ASSERT_FALSE(next.has_status()) << next.status().message();
  EXPECT_EQ(next.first_count(), 6u);
  for (uint32_t done = 1; done <= 6; ++done) {
    group_->Tell({.session = id, .ended = done});
    ASSERT_TRUE(AwaitStepCommands(std::min<size_t>(done + kCommandsAhead, 7)));
  }
  EXPECT_EQ(session.ReadEnded().step_id(), 1u);
  EXPECT_EQ(Length(), 21);
  const std::vector<worker::SessionStepCommand> commands = StepCommands();
  for (uint32_t i = 0; i < 6; ++i) {
    const worker::SessionStepCommand& command = commands[i];
    EXPECT_EQ(command.first_count, i);
    ASSERT_EQ(command.layers.size(), 1u);
    EXPECT_EQ(command.layers[0].layer, static_cast<int32_t>(i / 3));
    ASSERT_EQ(command.entries.size(), 1u);
    EXPECT_EQ(command.entries[0].first_position, 8 * (i % 3));
    EXPECT_EQ(command.entries[0].query_rows, i % 3 == 2 ? 4 : 8);
    EXPECT_EQ(command.entries[0].new_tokens, command.entries[0].query_rows);
    EXPECT_EQ(command.changes.empty(), i > 0);  // pages come once, ahead of all
  }
  EXPECT_EQ(commands[6].first_count, 6u);
  EXPECT_EQ(commands[6].layers.size(), 2u);
}

TEST_F(DeviceSessionTest, AStepThatEndsInTheMidstOfItsPiecesChangesNothing) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  v1::SubmitStep step = StepAt(1, 0);
  step.mutable_entries(0)->set_query_rows(20);
  step.mutable_entries(0)->set_new_tokens(20);
  session.Submit(step);
  ASSERT_FALSE(session.ReadAccepted().has_status());
  group_->Tell({.session = session.opened().session_id(),
                .ended = 4,
                .status = absl::DeadlineExceededError("the host is silent")});
  const v1::StepEnded ended = session.ReadEnded();
  EXPECT_EQ(ended.status().code(), static_cast<int>(StatusCode::DEADLINE_EXCEEDED));
  EXPECT_EQ(ended.layers_done(), 1);  // and a piece of the second
  EXPECT_EQ(session.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Length(), 0);
  EXPECT_LE(StepCommands().size(), static_cast<size_t>(kCommandsAhead));
}

TEST_F(DeviceSessionTest, AConflictOfAPieceIsOneOfItsEntry) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  const uint64_t id = session.opened().session_id();
  for (const uint64_t number : {1, 2}) {  // the second repeats the first
    v1::SubmitStep step = StepAt(number, 0);
    step.mutable_entries(0)->set_query_rows(20);
    step.mutable_entries(0)->set_new_tokens(20);
    session.Submit(step);
    ASSERT_FALSE(session.ReadAccepted().has_status());
    worker::SessionNews news{.session = id, .ended = static_cast<uint32_t>(6 * number)};
    // Of a piece that there is, and of one that there is not.
    if (number == 2) news.conflicts = {{10, 0}, {11, 5}, {99, 0}};
    group_->Tell(news);
    EXPECT_EQ(session.ReadEnded().status().code(),
              number == 1 ? 0 : static_cast<int>(StatusCode::ALREADY_EXISTS));
  }
}

// They share a mailbox, in which each has words of its own.
TEST_F(DeviceSessionTest, EndpointsShareTheMailbox) {
  Begin();
  v1::OpenSession open = DeviceOpen(/*measures=*/false);
  open.set_endpoints(2);
  SessionDriver session(service_->stub(), open);
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  const auto command = Last<worker::OpenSessionCommand>();
  EXPECT_EQ(command->endpoints, 2);
  const v1::SessionOpened& opened = session.opened();
  EXPECT_EQ(opened.endpoint_secret().size(), MailboxHandout::kTokenBytes);
  EXPECT_EQ(opened.layout().arrived(), command->layout.arrived);
  EXPECT_EQ(opened.shapes(0).q_heads(), 2);
  EXPECT_EQ(opened.shapes(0).slot_q_heads(), 4);
  EXPECT_EQ(opened.shapes(0).slot_kv_heads(), 2);

  SessionDriver joined(service_->stub(), JoinOf(opened, 1));
  ASSERT_TRUE(joined.is_open()) << joined.Finish().error_message();
  const v1::SessionOpened& other = joined.opened();
  EXPECT_EQ(other.device().raw_handle(), opened.device().raw_handle());
  EXPECT_EQ(other.layout().arrived(), opened.layout().arrived() + mailbox::kControlBytes);
  EXPECT_EQ(other.layout().status(), opened.layout().status() + mailbox::kControlBytes);
  EXPECT_EQ(other.layout().first_slot(), opened.layout().first_slot());
  EXPECT_EQ(other.layout().q(), opened.layout().q());
  EXPECT_EQ(other.waiting(), opened.waiting());
  EXPECT_EQ(other.shapes(0).first_q_head(), 2);
  EXPECT_EQ(other.shapes(0).first_kv_head(), 1);
  EXPECT_EQ(service_->Topology().sessions(0).endpoints_joined(), 2);

  session.Submit(StepAt(1, 0));
  EXPECT_FALSE(session.ReadAccepted().has_status());
  EXPECT_FALSE(joined.ReadAccepted().has_status());
  joined.Cancel();  // its process was killed
  const v1::StepEnded ended = session.ReadEnded();
  EXPECT_EQ(ended.status().code(), static_cast<int>(StatusCode::ABORTED));
  const grpc::Status why = session.Finish();
  EXPECT_EQ(why.error_code(), StatusCode::ABORTED);
  EXPECT_THAT(why.error_message(), HasSubstr("endpoint 1"));
  EXPECT_EQ(Last<worker::CloseSessionCommand>()->status, static_cast<int>(StatusCode::ABORTED));
  EXPECT_EQ(Length(), 0);
}

TEST_F(DeviceSessionTest, OnlySessionsOnGpusAreTimed) {
  Begin();
  v1::OpenSession open = DeviceOpen(/*measures=*/false);
  open.set_timed(true);
  SessionDriver session(service_->stub(), open);
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  EXPECT_GT(session.opened().layout().stamps(), 0u);
  EXPECT_EQ(Last<worker::OpenSessionCommand>()->layout.stamps, session.opened().layout().stamps());
  open = MessagesSession(8);
  open.set_timed(true);
  SessionDriver refused(service_->stub(), open);
  const grpc::Status status = refused.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(FieldOf(status), "open.timed");
}

TEST_F(DeviceSessionTest, WorkersOfAnOlderBuildKnowNothingOfEndpoints) {
  Begin();
  group_->SpeakProtocol(worker::kSharedMailboxProtocol - 1);
  for (const bool timed : {false, true}) {
    v1::OpenSession open = DeviceOpen(/*measures=*/false);
    timed ? open.set_timed(true) : open.set_endpoints(2);
    SessionDriver session(service_->stub(), open);
    const grpc::Status status = session.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(FieldOf(status), timed ? "open.timed" : "open.endpoints");
  }
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  EXPECT_TRUE(session.is_open());
}

TEST_F(DeviceSessionTest, ANewEpochEndsIt) {
  Begin();
  SessionDriver session(service_->stub(), DeviceOpen(/*measures=*/false));
  ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
  session.Submit(StepAt(1, 0));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  group_->Break("a worker was killed");
  EXPECT_EQ(session.ReadEnded().status().code(), static_cast<int>(StatusCode::ABORTED));
  EXPECT_EQ(session.Finish().error_code(), StatusCode::ABORTED);
  group_->Form({false});
  // What its ranks say late means nothing.
  group_->Tell({.session = session.opened().session_id(), .ended = 2});
  EXPECT_EQ(Length(), 0);
}

}  // namespace
}  // namespace tributary::service::testing
