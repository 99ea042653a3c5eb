// What becomes of sessions in shared memory when one side falls silent, dies or breaks: every wait
// ends by its bound, the status says why, nobody else's calls are delayed, and what was not carried
// out is not held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include "tests/service/fake_group.h"
#include "tests/service/model_host.h"
#include "tests/service/session_driver.h"
#include "tests/service/session_host.h"
#include "tests/service/test_service.h"

namespace tributary::service::testing {
namespace {

using client::HostSession;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using Requests = std::vector<v1::AttendRequest>;

// Far above any bound that a test sets, and far below gRPC's and the service's own.
constexpr seconds kSoon{8};

class SessionFailureTest : public ::testing::Test {
 protected:
  void Prepare(TestService& service, int sequences) {
    ASSERT_TRUE(CreateCache(service.stub(), "m", spec_).ok());
    for (int id = 1; id <= sequences; ++id) ASSERT_TRUE(Open(service.stub(), "m", id).ok());
  }
  static std::unique_ptr<HostSession> OpenAt(const TestService& service,
                                             milliseconds wait_timeout = seconds(60)) {
    return OpenSessionAt(service.address(), {.max_rows = 8,
                                             .max_new_tokens = 8,
                                             .wait_timeout = wait_timeout,
                                             .memory = v1::SESSION_MEMORY_HOST});
  }
  // 4 tokens of sequence 1 behind the first `first`, in both layers.
  Requests Tokens(int64_t first = 0) const {
    return {AttendOf(spec_, "m", 1, first, 4, 0), AttendOf(spec_, "m", 1, first, 4, 1)};
  }
  static int64_t LengthOf(TestService& service, uint64_t sequence) {
    const v1::GetTopologyReply topology = service.Topology();
    for (const v1::SequenceInfo& info : topology.caches(0).sequence()) {
      if (info.sequence_id() == sequence) return info.length();
    }
    return -1;
  }
  // Calls of sequence 1 go on from nothing.
  void ExpectNothingHeld(TestService& service) const {
    // A host that leaves does not wait until the service has heard of it.
    EXPECT_TRUE(test::Eventually(kSoon, [&] { return LengthOf(service, 1) == 0; }));
    ModelHost model(&service.stub(), "m", spec_, DType::kF32, 7);
    model.Step(0, {{1, 3}});
    model.Step(1, {{1, 3}});
  }

  const v1::CacheSpec spec_ = SmallSpec();
  const Clock::time_point begin_ = Clock::now();
};

TEST_F(SessionFailureTest, ASilentHostLosesItsSessionAndNobodyWaitsForIt) {
  TestService service({.workers = 2});
  Prepare(service, 2);
  const auto session = OpenAt(service, milliseconds(300));
  const auto first = session->Submit(StepOf(Tokens(0)));
  const auto second = session->Submit(StepOf(Tokens(4)));
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  // Other sequences are served while the session waits for its host.
  ModelHost model(&service.stub(), "m", spec_, DType::kF32, 1);
  const Clock::time_point silent = Clock::now();
  model.Step(0, {{2, 3}});
  EXPECT_TRUE(session->status().ok() || Clock::now() - silent > milliseconds(200));
  // Both steps end with the reason, and what the first had done is undone.
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Await(*first)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Await(*second)));
  const absl::Status late = AttendWith(*session, Tokens()[1], nullptr);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(late.message(), ::testing::HasSubstr("layer 1 of step 1"));
  EXPECT_EQ(session->status(), late);
  ExpectNothingHeld(service);
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AHostThatIsGoneGivesItsSequencesBackAtOnce) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  {
    const auto session = OpenAt(service);
    ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
    ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  }
  ExpectNothingHeld(service);
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, ABrokenGroupEndsTheLayerInFlight) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  const auto session = OpenAt(service);
  const auto step = session->Submit(StepOf(Tokens()));
  ASSERT_TRUE(step.ok());
  group->Hold();
  auto done =
      std::async(std::launch::async, [&] { return AttendWith(*session, Tokens()[0], nullptr); });
  group->WaitForHeld(1);
  group->Break("a worker is gone");
  const absl::Status why = done.get();
  EXPECT_TRUE(absl::IsAborted(why)) << why;
  EXPECT_TRUE(absl::IsAborted(session->Await(*step)));
  group->Form({false, false});
  service.WaitReady();
  EXPECT_EQ(LengthOf(service, 1), 0);
  // The session is of the epoch that is over; another one works.
  group->Release();
  EXPECT_FALSE(session->Submit(StepOf(Tokens())).ok());
  const auto next = OpenAt(service);
  ASSERT_TRUE(next->Submit(StepOf(Tokens())).ok());
  for (const auto& request : Tokens()) EXPECT_TRUE(AttendWith(*next, request, nullptr).ok());
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AGroupThatChangedBetweenLayersEndsTheSession) {
  auto* group = new FakeGroup(2);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  const auto session = OpenAt(service);
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  group->Break("a worker is gone");
  group->Form({true, true});
  service.WaitReady();
  const absl::Status why = AttendWith(*session, Tokens()[1], nullptr);
  EXPECT_TRUE(absl::IsAborted(why)) << why;
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, WorkersThatDoNotAnswerEndTheHostsWait) {
  auto* group = new FakeGroup(1);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  auto session = OpenAt(service, milliseconds(300));
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  group->Hold();
  const absl::Status why = AttendWith(*session, Tokens()[0], nullptr);
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_EQ(AttendWith(*session, Tokens()[1], nullptr), why);
  // The layer is still the workers': its memory stays until they let go of it.
  session.reset();
  group->Release();
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AResultOfAnotherSizeIsNotHandedOut) {
  auto* group = new FakeGroup(1);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  const auto session = OpenAt(service);
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  group->Hold();
  auto done =
      std::async(std::launch::async, [&] { return AttendWith(*session, Tokens()[0], nullptr); });
  group->WaitForHeld(1);
  group->ReleaseOne(
      [](const worker::StepCommand&, Outcome* outcome) { outcome->replies[0].o.resize(1 << 20); });
  EXPECT_TRUE(absl::IsInternal(done.get()));
  group->Release();
}

TEST_F(SessionFailureTest, AConflictOfAnEntryThatIsNotThereEndsTheSession) {
  auto* group = new FakeGroup(1);
  TestService service({}, std::unique_ptr<WorkerGroup>(group));
  Prepare(service, 1);
  for (const int32_t entry : {-1, 1}) {
    const auto session = OpenAt(service);
    ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
    group->Hold();
    auto done =
        std::async(std::launch::async, [&] { return AttendWith(*session, Tokens()[0], nullptr); });
    group->WaitForHeld(1);
    group->ReleaseOne([entry](const worker::StepCommand&, Outcome* outcome) {
      outcome->replies[0].conflicts = {entry};
    });
    EXPECT_TRUE(absl::IsInternal(done.get()));
    group->Release();
  }
}

TEST_F(SessionFailureTest, CloseInTheMidstOfAStepWaitsForItsBound) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  const auto session = OpenAt(service, milliseconds(300));
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Close()));
  ExpectNothingHeld(service);
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, ADeletedCacheEndsItsSessions) {
  TestService service({.workers = 2});
  Prepare(service, 1);
  const auto session = OpenAt(service);
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  grpc::ClientContext context;
  v1::DeleteCacheRequest request;
  request.set_cache_id("m");
  v1::DeleteCacheReply reply;
  ASSERT_TRUE(service.stub().DeleteCache(&context, request, &reply).ok());
  const absl::Status why = AttendWith(*session, Tokens()[1], nullptr);
  EXPECT_TRUE(absl::IsNotFound(why)) << why;
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AServiceThatStopsEndsTheWaitsOfHosts) {
  auto* group = new FakeGroup(1);
  std::optional<TestService> service;
  service.emplace(TestService::Options{}, std::unique_ptr<WorkerGroup>(group));
  Prepare(*service, 1);
  const auto session = OpenAt(*service);
  ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
  group->Hold();
  auto done =
      std::async(std::launch::async, [&] { return AttendWith(*session, Tokens()[0], nullptr); });
  group->WaitForHeld(1);
  group->Break("stopping");  // as a group does that is stopped
  service.reset();
  const absl::Status why = done.get();
  EXPECT_FALSE(why.ok());
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

// One session is broken off again and again while another one works.
TEST_F(SessionFailureTest, SessionsThatComeAndGoLeaveNothingBehind) {
  TestService service({.workers = 2});
  Prepare(service, 2);
  ModelHost model(&service.stub(), "m", spec_, DType::kF32, 1);
  const auto steady = OpenAt(service);
  for (int i = 0; i < 100; ++i) {
    const auto session = OpenAt(service);
    ASSERT_NE(session, nullptr);
    ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
    if (i % 3 != 0) {
      ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
    }
    if (i % 10 == 0) {
      RunStep(*steady, model, {model.MakeStep(0, {{2, 1}}), model.MakeStep(1, {{2, 1}})});
    }
  }
  ExpectNothingHeld(service);
}

}  // namespace
}  // namespace tributary::service::testing
