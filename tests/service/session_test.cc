// Sessions whose layers come as messages: results, steps submitted ahead, refusals, and how
// sessions end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "tests/service/fake_group.h"
#include "tests/service/model_host.h"
#include "tests/service/session_driver.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using ::grpc::StatusCode;
using Entries = std::vector<std::pair<uint64_t, int32_t>>;
using Requests = std::vector<v1::AttendRequest>;

std::string FieldIn(const google::rpc::Status& status) {
  google::rpc::BadRequest bad;
  if (!DetailOf(status, &bad) || bad.field_violations_size() == 0) return "";
  return bad.field_violations(0).field();
}

class SessionTest : public ::testing::Test {
 protected:
  void Prepare(TestService& service, int sequences) {
    ASSERT_TRUE(CreateCache(service.stub(), "m", spec_).ok());
    for (int id = 1; id <= sequences; ++id) ASSERT_TRUE(Open(service.stub(), "m", id).ok());
  }

  // New tokens for both layers.
  static Requests Make(ModelHost& host, const Entries& entries) {
    return {host.MakeStep(0, entries), host.MakeStep(1, entries)};
  }
  // Sends the layers of an accepted step and checks what comes back.
  static void Drive(SessionDriver& session, ModelHost& host, uint64_t step_id,
                    const Requests& requests, v1::DType dtype = v1::DTYPE_F32) {
    for (const v1::AttendRequest& request : requests) {
      session.SendLayer(step_id, request);
      host.Check(request, session.ReadReply(request, dtype));
    }
    const v1::StepEnded ended = session.ReadEnded();
    EXPECT_EQ(ended.step_id(), step_id);
    EXPECT_FALSE(ended.has_status()) << ended.status().message();
  }
  static void Step(SessionDriver& session, ModelHost& host, uint64_t step_id,
                   const Requests& requests, v1::DType dtype = v1::DTYPE_F32) {
    session.Submit(SessionDriver::StepOf(step_id, requests));
    const v1::StepAccepted accepted = session.ReadAccepted();
    ASSERT_FALSE(accepted.has_status()) << accepted.status().message();
    Drive(session, host, step_id, requests, dtype);
  }
  // EXPECTs that a step is refused and that nothing is changed.
  static void ExpectRefused(SessionDriver& session, const v1::SubmitStep& step, StatusCode code,
                            const std::string& field) {
    session.Submit(step);
    const v1::StepAccepted accepted = session.ReadAccepted();
    EXPECT_EQ(accepted.step_id(), step.step_id());
    EXPECT_EQ(accepted.status().code(), static_cast<int>(code)) << accepted.status().message();
    EXPECT_EQ(FieldIn(accepted.status()), field) << accepted.status().message();
  }
  static int64_t LengthOf(TestService& service, uint64_t sequence) {
    const v1::GetTopologyReply topology = service.Topology();
    for (const v1::SequenceInfo& info : topology.caches(0).sequence()) {
      if (info.sequence_id() == sequence) return info.length();
    }
    return -1;
  }

  const v1::CacheSpec spec_ = SmallSpec();
};

TEST_F(SessionTest, StepsGiveWhatTheReferenceGives) {
  for (const auto& [dtype, proto] :
       {std::pair{DType::kF32, v1::DTYPE_F32}, std::pair{DType::kBf16, v1::DTYPE_BF16},
        std::pair{DType::kF16, v1::DTYPE_F16}}) {
    TestService service({.workers = 2});
    Prepare(service, 3);
    ModelHost host(&service.stub(), "m", spec_, dtype, 1);
    v1::OpenSession open = MessagesSession(128);
    open.set_q_dtype(proto);
    SessionDriver session(service.stub(), open);
    ASSERT_TRUE(session.is_open()) << session.Finish().error_message();
    Step(session, host, 1, Make(host, {{1, 40}, {2, 70}}), proto);  // a prompt
    Step(session, host, 2, Make(host, {{1, 1}, {2, 1}, {3, 1}}), proto);
    Step(session, host, 3, Make(host, {{1, 4}, {3, 8}}), proto);  // rows to verify
    Step(session, host, 5, {host.MakeDraft(0, {{1, 8}}), host.MakeDraft(1, {{1, 8}})}, proto);
    session.SendClose();
    EXPECT_TRUE(session.Finish().ok());
    host.Step(0, {{1, 1}});  // and calls go on from there
    host.Step(1, {{1, 1}});
  }
}

TEST_F(SessionTest, AStepIsSubmittedWhileAnEarlierOneRuns) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver session(service.stub(), MessagesSession(16));
  Requests before = Make(host, {{1, 3}});
  session.Submit(SessionDriver::StepOf(1, before));
  EXPECT_EQ(session.ReadAccepted().first_count(), 0u);
  for (uint64_t id = 2; id < 20; ++id) {
    // The model must be asked for the earlier step before it learns of the later one's tokens.
    v1::SubmitStep next = SessionDriver::StepOf(id, before);
    next.mutable_entries(0)->set_first_position(before[0].entries(0).first_position() +
                                                before[0].entries(0).new_tokens());
    next.mutable_entries(0)->set_query_rows(1);
    next.mutable_entries(0)->set_new_tokens(1);
    session.Submit(next);
    const v1::StepAccepted accepted = session.ReadAccepted();
    ASSERT_FALSE(accepted.has_status()) << accepted.status().message();
    EXPECT_EQ(accepted.first_count(), 2 * (id - 1));
    Drive(session, host, id - 1, before);
    before = Make(host, {{1, 1}});
  }
  Drive(session, host, 19, before);
}

TEST_F(SessionTest, AppendOnlyStepsAndLayerRanges) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver session(service.stub(), MessagesSession(64));
  const Requests appended = Make(host, {{1, 33}});
  v1::SubmitStep append = SessionDriver::StepOf(1, appended);
  append.set_append_only(true);
  append.mutable_entries(0)->set_query_rows(0);
  session.Submit(append);
  ASSERT_FALSE(session.ReadAccepted().has_status());
  for (v1::AttendRequest request : appended) {
    request.clear_q();
    session.SendLayer(1, request);
    EXPECT_EQ(session.ReadLayer().output(), "");
  }
  EXPECT_FALSE(session.ReadEnded().has_status());
  Step(session, host, 2, {host.MakeStep(1, {{1, 2}})});
  EXPECT_EQ(LengthOf(service, 1), 33);  // layer 0 has not seen them
  v1::SubmitStep both = SessionDriver::StepOf(3, appended);
  both.mutable_entries(0)->set_first_position(33);
  ExpectRefused(session, both, StatusCode::OUT_OF_RANGE, "entries[0].first_position");
  Step(session, host, 4, {host.MakeStep(0, {{1, 2}})});
  Step(session, host, 5, Make(host, {{1, 1}}));
}

TEST_F(SessionTest, RefusalsNameTheFieldAndChangeNothing) {
  TestService service({.workers = 2});
  Prepare(service, 2);
  SessionDriver session(service.stub(), MessagesSession(4));
  ASSERT_TRUE(session.is_open());
  const std::string before = service.State();
  uint64_t id = 0;
  const auto refused = [&](const std::function<void(v1::SubmitStep*)>& edit, StatusCode code,
                           const std::string& field) {
    v1::SubmitStep step = SessionDriver::StepOf(++id, {AttendOf(spec_, "m", 1, 0, 1)});
    edit(&step);
    ExpectRefused(session, step, code, field);
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  refused([](auto* s) { s->set_first_layer(2); }, invalid, "first_layer");
  refused([](auto* s) { s->set_first_layer(-1); }, invalid, "first_layer");
  refused([](auto* s) { s->set_layers(3); }, invalid, "layers");
  refused([](auto* s) { s->set_layers(0); }, invalid, "layers");
  refused([](auto* s) { s->clear_mode(); }, invalid, "mode");
  refused([](auto* s) { s->clear_entries(); }, invalid, "entries");
  refused([](auto* s) { *s->add_entries() = s->entries(0); }, invalid, "entries[1].sequence_id");
  refused([](auto* s) { s->mutable_entries(0)->set_query_rows(0); }, invalid,
          "entries[0].query_rows");
  refused([](auto* s) { s->mutable_entries(0)->set_first_position(-1); }, invalid,
          "entries[0].first_position");
  refused([](auto* s) { s->mutable_entries(0)->set_first_position(7); }, StatusCode::OUT_OF_RANGE,
          "entries[0].first_position");
  refused([](auto* s) { s->mutable_entries(0)->set_sequence_id(9); }, StatusCode::NOT_FOUND,
          "entries[0].sequence_id");
  refused(
      [](auto* s) {
        s->mutable_entries(0)->set_fork_from(1);
        s->mutable_entries(0)->clear_sequence_id();
      },
      invalid, "entries[0].sequence_id");
  refused([](auto* s) { s->mutable_entries(0)->set_fork_from(9); }, StatusCode::NOT_FOUND,
          "entries[0].fork_from");
  id -= 2;
  refused([](auto*) {}, invalid, "step_id");
  EXPECT_EQ(service.State(), before);
}

// It would take the service's memory before anybody saw that no sequence has so many tokens.
TEST_F(SessionTest, AStepOfAnyNumberOfPiecesIsRefused) {
  TestService service({.workers = 1});
  Prepare(service, 1);
  SessionDriver session(service.stub(), MessagesSession(1));
  ASSERT_TRUE(session.is_open());
  v1::SubmitStep step = SessionDriver::StepOf(1, {AttendOf(spec_, "m", 1, 0, 1)});
  step.mutable_entries(0)->set_query_rows(std::numeric_limits<int32_t>::max());
  for (const int32_t tokens : {0, std::numeric_limits<int32_t>::max()}) {
    step.set_step_id(step.step_id() + 1);
    step.mutable_entries(0)->set_new_tokens(tokens);
    session.Submit(step);
    const v1::StepAccepted refused = session.ReadAccepted();
    EXPECT_EQ(refused.status().code(), StatusCode::RESOURCE_EXHAUSTED);
    google::rpc::QuotaFailure quota;
    ASSERT_TRUE(DetailOf(refused.status(), &quota));
    EXPECT_EQ(quota.violations(0).subject(), "session max_rows");
  }
  step.set_step_id(step.step_id() + 1);
  step.set_append_only(true);
  step.mutable_entries(0)->clear_query_rows();
  session.Submit(step);
  EXPECT_EQ(session.ReadAccepted().status().code(), StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(SessionTest, ASessionThatCannotBeIsRefused) {
  TestService service({.workers = 1});
  Prepare(service, 1);
  const auto refused = [&](const std::function<void(v1::OpenSession*)>& edit, StatusCode code,
                           const std::string& field) {
    v1::OpenSession open = MessagesSession(4);
    edit(&open);
    SessionDriver session(service.stub(), open);
    EXPECT_FALSE(session.is_open());
    const grpc::Status status = session.Finish();
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(FieldOf(status), field) << status.error_message();
  };
  const auto invalid = StatusCode::INVALID_ARGUMENT;
  refused([](auto* o) { o->set_max_rows(0); }, invalid, "open.max_rows");
  refused([](auto* o) { o->set_slots(3); }, invalid, "open.slots");
  refused([](auto* o) { o->set_max_steps(17); }, invalid, "open.max_steps");
  refused([](auto* o) { o->clear_q_dtype(); }, invalid, "open.q_dtype");
  refused([](auto* o) { o->clear_memory(); }, invalid, "open.memory");
  refused([](auto* o) { o->set_cache_id("none"); }, StatusCode::NOT_FOUND, "open.cache_id");
}

TEST_F(SessionTest, StepsInFlightAreBounded) {
  TestService service({.workers = 1});
  Prepare(service, 3);
  SessionDriver session(service.stub(), MessagesSession(4));
  for (uint64_t id = 1; id <= 3; ++id) {
    session.Submit(SessionDriver::StepOf(id, {AttendOf(spec_, "m", id, 0, 1)}));
    EXPECT_EQ(session.ReadAccepted().status().code(), id < 3 ? 0 : StatusCode::RESOURCE_EXHAUSTED);
  }
}

TEST_F(SessionTest, SequencesAreTruncatedAndForkedByTheStep) {
  TestService service({.workers = 2});
  Prepare(service, 2);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver session(service.stub(), MessagesSession(128));
  Step(session, host, 1, Make(host, {{1, 40}, {2, 30}}));
  // What the model does by calls, the session does with the step: so the model is of another cache.
  v1::SubmitStep step;
  const v1::AttendRequest row = QueryOf(spec_, "m", 1, 19, 1);
  step = SessionDriver::StepOf(2, {row, QueryOf(spec_, "m", 1, 19, 1, 1)});
  step.mutable_entries(0)->set_truncate_to(20);
  session.Submit(step);
  v1::StepAccepted accepted = session.ReadAccepted();
  ASSERT_FALSE(accepted.has_status()) << accepted.status().message();
  EXPECT_EQ(accepted.lengths(0), 20);
  session.SendLayer(2, row);
  session.ReadLayer();
  session.SendLayer(2, QueryOf(spec_, "m", 1, 19, 1, 1));
  session.ReadLayer();
  EXPECT_FALSE(session.ReadEnded().has_status());
  host.Truncate(1, 20);
  Step(session, host, 3, Make(host, {{1, 3}}));
  // The two beams change places.
  Requests swapped = {QueryOf(spec_, "m", 1, 29, 1, 0, 5), QueryOf(spec_, "m", 1, 29, 1, 1, 6)};
  step = SessionDriver::StepOf(4, swapped);
  step.mutable_entries(0)->set_fork_from(2);
  *step.add_entries() = step.entries(0);
  step.mutable_entries(1)->set_sequence_id(2);
  step.mutable_entries(1)->set_fork_from(1);
  step.mutable_entries(1)->set_first_position(22);
  session.Submit(step);
  accepted = session.ReadAccepted();
  ASSERT_FALSE(accepted.has_status()) << accepted.status().message();
  EXPECT_EQ(accepted.lengths(0), 30);
  EXPECT_EQ(accepted.lengths(1), 23);
  for (v1::AttendRequest request : swapped) {
    request.mutable_q()->mutable_inline_()->append(request.q().inline_());
    session.SendLayer(4, request);
    session.ReadLayer();
  }
  EXPECT_FALSE(session.ReadEnded().has_status());
  // The rows of sequence 1 are now what calls say of it, and they are those of what was 2.
  EXPECT_EQ(LengthOf(service, 1), 30);
  EXPECT_EQ(LengthOf(service, 2), 23);
  host.Fork(2, 3, 23);
}

TEST_F(SessionTest, ASilentHostLosesItsSessionAndNothingElse) {
  TestService service({.workers = 2});
  Prepare(service, 2);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  v1::OpenSession open = MessagesSession(8);
  open.set_wait_timeout_ms(100);
  SessionDriver session(service.stub(), open);
  Requests requests = {AttendOf(spec_, "m", 1, 0, 4, 0), AttendOf(spec_, "m", 1, 0, 4, 1)};
  session.Submit(SessionDriver::StepOf(1, requests));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  v1::SubmitStep later = SessionDriver::StepOf(2, requests);
  later.mutable_entries(0)->set_first_position(4);
  session.Submit(later);
  ASSERT_FALSE(session.ReadAccepted().has_status());
  session.SendLayer(1, requests[0]);
  session.ReadLayer();
  const v1::StepEnded ended = session.ReadEnded();
  EXPECT_EQ(ended.status().code(), StatusCode::DEADLINE_EXCEEDED) << ended.status().message();
  EXPECT_EQ(ended.layers_done(), 1);
  EXPECT_EQ(session.ReadEnded().step_id(), 2u);
  EXPECT_EQ(session.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(LengthOf(service, 1), 0);
  host.Step(0, {{1, 3}});  // the tokens of layer 0 are not held, either
  host.Step(1, {{1, 3}});
}

TEST_F(SessionTest, AKilledHostGivesItsSequencesBackAtOnce) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  {
    SessionDriver session(service.stub(), MessagesSession(8));
    session.Submit(SessionDriver::StepOf(
        1, {AttendOf(spec_, "m", 1, 0, 4, 0), AttendOf(spec_, "m", 1, 0, 4, 1)}));
    ASSERT_FALSE(session.ReadAccepted().has_status());
    session.SendLayer(1, AttendOf(spec_, "m", 1, 0, 4, 0));
  }  // cancels, maybe in the middle of the layer
  host.Step(0, {{1, 3}});
  host.Step(1, {{1, 3}});
}

TEST_F(SessionTest, WrongLayersEndTheSession) {
  TestService service({.workers = 1});
  Prepare(service, 1);
  const auto ends = [&](const std::function<void(v1::AttendRequest*)>& edit,
                        const std::string& field) {
    SessionDriver session(service.stub(), MessagesSession(8));
    v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 1);
    session.Submit(SessionDriver::StepOf(1, {request}));
    ASSERT_FALSE(session.ReadAccepted().has_status());
    edit(&request);
    session.SendLayer(1, request);
    EXPECT_TRUE(session.ReadEnded().has_status());
    const grpc::Status status = session.Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_EQ(FieldOf(status), field) << status.error_message();
  };
  ends([](auto* r) { r->set_layer(1); }, "layer.layer");
  ends([](auto* r) { r->mutable_q()->mutable_inline_()->pop_back(); }, "layer.q");
  ends([](auto* r) { r->mutable_k()->clear_inline_(); }, "layer.k");
  ends([](auto* r) { r->mutable_v()->mutable_inline_()->append("x"); }, "layer.v");
  EXPECT_EQ(LengthOf(service, 1), 0);
}

TEST_F(SessionTest, ABrokenGroupEndsItsSessions) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  SessionDriver session(service.stub(), MessagesSession(8));
  group->Hold();
  const Requests requests = {AttendOf(spec_, "m", 1, 0, 4, 0), AttendOf(spec_, "m", 1, 0, 4, 1)};
  session.Submit(SessionDriver::StepOf(1, requests));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  session.SendLayer(1, requests[0]);
  group->WaitForHeld(1);
  group->Break("a worker is gone");
  EXPECT_EQ(session.ReadEnded().status().code(), StatusCode::ABORTED);
  EXPECT_EQ(session.Finish().error_code(), StatusCode::ABORTED);
  group->Form({false, false});
  service.WaitReady();
  EXPECT_EQ(LengthOf(service, 1), 0);
}

TEST_F(SessionTest, AResultOfAnotherSizeEndsTheSessionAndIsNotRead) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  SessionDriver session(service.stub(), MessagesSession(16));
  const v1::AttendRequest request = AttendOf(spec_, "m", 1, 0, 2);
  session.Submit(SessionDriver::StepOf(1, {request, request}));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  group->Hold();
  session.SendLayer(1, request);
  group->ReleaseOne([](const worker::StepCommand&, Outcome* outcome) {
    outcome->replies[0].result = worker::ResultBytes(1 << 20);
  });
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INTERNAL) << status.error_message();
  group->Release();
}

TEST_F(SessionTest, ARepeatedStepIsComparedAndHoldsItsSequences) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver session(service.stub(), MessagesSession(8));
  const Requests requests = Make(host, {{1, 4}});
  Step(session, host, 1, requests);
  Step(session, host, 2, requests);
  session.Submit(SessionDriver::StepOf(3, requests));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  for (v1::AttendRequest other : requests) {
    *other.mutable_k() = InlineTensor(DType::kF32, {4, 2, 64}, RandomValues(4 * 2 * 64, 99));
    session.SendLayer(3, other);
    session.ReadLayer();
  }
  const v1::StepEnded ended = session.ReadEnded();
  EXPECT_EQ(ended.status().code(), StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(FieldIn(ended.status()), "entries[0].first_position");
  Step(session, host, 4, Make(host, {{1, 1}}));
}

TEST_F(SessionTest, TwoSessionsShareASequenceInTurn) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver first(service.stub(), MessagesSession(8));
  SessionDriver second(service.stub(), MessagesSession(8));
  const Requests one = Make(host, {{1, 4}});
  first.Submit(SessionDriver::StepOf(1, one));
  ASSERT_FALSE(first.ReadAccepted().has_status());
  v1::SubmitStep behind = SessionDriver::StepOf(1, one);
  behind.mutable_entries(0)->set_first_position(4);
  second.Submit(behind);
  Drive(first, host, 1, one);
  ASSERT_FALSE(second.ReadAccepted().has_status());
  Drive(second, host, 1, Make(host, {{1, 4}}));
}

TEST_F(SessionTest, ADrainLetsStepsEnd) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  ModelHost host(&service.stub(), "m", spec_, DType::kF32, 1);
  SessionDriver session(service.stub(), MessagesSession(8));
  SessionDriver idle(service.stub(), MessagesSession(8));
  ASSERT_TRUE(idle.is_open());
  const Requests requests = Make(host, {{1, 4}});
  session.Submit(SessionDriver::StepOf(1, requests));
  ASSERT_FALSE(session.ReadAccepted().has_status());
  service.coordinator().StartDraining();
  EXPECT_EQ(idle.Finish().error_code(), StatusCode::UNAVAILABLE);
  Drive(session, host, 1, requests);
  EXPECT_EQ(session.Finish().error_code(), StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace tributary::service::testing
