// What becomes of sessions in shared memory when one side falls silent, dies or breaks: every wait
// ends by its bound, the status says why, nobody else's calls are delayed, and what was not carried
// out is not held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
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
  // A service of two workers, or one over a group of so many ranks that obeys the test.
  void Serve(int sequences = 1) {
    service_.emplace(TestService::Options{.workers = 2});
    PrepareCache(*service_, spec_, sequences);
  }
  void ServeOverFakeGroup(int ranks) {
    auto group = std::make_unique<FakeGroup>(ranks);
    group_ = group.get();
    service_.emplace(TestService::Options{}, std::move(group));
    PrepareCache(*service_, spec_, 1);
  }
  std::unique_ptr<HostSession> OpenSession(milliseconds wait_timeout = seconds(60)) {
    return OpenSessionAt(service_->address(), {.max_rows = 8,
                                               .max_new_tokens = 8,
                                               .wait_timeout = wait_timeout,
                                               .memory = v1::SESSION_MEMORY_HOST});
  }
  // A session with a step of Tokens(), of which the first `layers` layers are over.
  std::unique_ptr<HostSession> OpenInStep(int layers, milliseconds wait_timeout = seconds(60)) {
    auto session = OpenSession(wait_timeout);
    const Requests requests = Tokens();
    EXPECT_TRUE(session->Submit(StepOf(requests)).ok());
    for (int layer = 0; layer < layers; ++layer) {
      EXPECT_TRUE(AttendWith(*session, requests[static_cast<size_t>(layer)], nullptr).ok());
    }
    return session;
  }
  // Hands the first layer over; returns when the fake group holds it.
  std::future<absl::Status> AttendHeld(HostSession& session) {
    group_->Hold();
    auto done = std::async(std::launch::async,
                           [&session, this] { return AttendWith(session, Tokens()[0], nullptr); });
    group_->WaitForHeld(1);
    return done;
  }
  // 4 tokens of sequence 1 behind the first `first`, in both layers.
  Requests Tokens(int64_t first = 0) const {
    return {AttendOf(spec_, "m", 1, first, 4, 0), AttendOf(spec_, "m", 1, first, 4, 1)};
  }
  int64_t LengthOf(uint64_t sequence) {
    const v1::GetTopologyReply topology = service_->Topology();
    for (const v1::SequenceInfo& info : topology.caches(0).sequence()) {
      if (info.sequence_id() == sequence) return info.length();
    }
    return -1;
  }
  // Calls of sequence 1 go on from nothing.
  void ExpectNothingHeld() {
    // A host that leaves does not wait until the service has heard of it.
    EXPECT_TRUE(test::Eventually(kSoon, [&] { return LengthOf(1) == 0; }));
    ModelHost model(&service_->stub(), "m", spec_, DType::kF32, 7);
    model.Step(0, {{1, 3}});
    model.Step(1, {{1, 3}});
  }

  const v1::CacheSpec spec_ = SmallSpec();
  std::optional<TestService> service_;
  FakeGroup* group_ = nullptr;  // the service's, where there is one
  const Clock::time_point begin_ = Clock::now();
};

TEST_F(SessionFailureTest, ASilentHostLosesItsSessionAndNobodyWaitsForIt) {
  Serve(/*sequences=*/2);
  const auto session = OpenSession(milliseconds(300));
  const auto first = session->Submit(StepOf(Tokens(0)));
  const auto second = session->Submit(StepOf(Tokens(4)));
  ASSERT_TRUE(first.ok() && second.ok());
  ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
  // Other sequences are served while the session waits for its host.
  ModelHost model(&service_->stub(), "m", spec_, DType::kF32, 1);
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
  ExpectNothingHeld();
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AHostThatIsGoneGivesItsSequencesBackAtOnce) {
  Serve();
  { const auto session = OpenInStep(/*layers=*/1); }
  ExpectNothingHeld();
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, ABrokenGroupEndsTheLayerInFlight) {
  ServeOverFakeGroup(2);
  const auto session = OpenSession();
  const auto step = session->Submit(StepOf(Tokens()));
  ASSERT_TRUE(step.ok());
  auto done = AttendHeld(*session);
  group_->Break("a worker is gone");
  const absl::Status why = done.get();
  EXPECT_TRUE(absl::IsAborted(why)) << why;
  EXPECT_TRUE(absl::IsAborted(session->Await(*step)));
  group_->Form({false, false});
  service_->WaitReady();
  EXPECT_EQ(LengthOf(1), 0);
  // The session is of the epoch that is over; another one works.
  group_->Release();
  EXPECT_FALSE(session->Submit(StepOf(Tokens())).ok());
  const auto next = OpenSession();
  ASSERT_TRUE(next->Submit(StepOf(Tokens())).ok());
  for (const auto& request : Tokens()) EXPECT_TRUE(AttendWith(*next, request, nullptr).ok());
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AGroupThatChangedBetweenLayersEndsTheSession) {
  ServeOverFakeGroup(2);
  const auto session = OpenInStep(/*layers=*/1);
  group_->Break("a worker is gone");
  group_->Form({true, true});
  service_->WaitReady();
  const absl::Status why = AttendWith(*session, Tokens()[1], nullptr);
  EXPECT_TRUE(absl::IsAborted(why)) << why;
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, WorkersThatDoNotAnswerEndTheHostsWait) {
  ServeOverFakeGroup(1);
  auto session = OpenInStep(/*layers=*/0, milliseconds(300));
  group_->Hold();
  const absl::Status why = AttendWith(*session, Tokens()[0], nullptr);
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_EQ(AttendWith(*session, Tokens()[1], nullptr), why);
  // The layer is still the workers': its memory stays until they let go of it.
  session.reset();
  group_->Release();
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AResultOfAnotherSizeIsNotHandedOut) {
  ServeOverFakeGroup(1);
  const auto session = OpenInStep(/*layers=*/0);
  auto done = AttendHeld(*session);
  group_->ReleaseOne([](const worker::StepCommand&, Outcome* outcome) {
    outcome->replies[0].result = worker::ResultBytes(1 << 20);
  });
  EXPECT_TRUE(absl::IsInternal(done.get()));
  group_->Release();
}

TEST_F(SessionFailureTest, AConflictOfAnEntryThatIsNotThereEndsTheSession) {
  ServeOverFakeGroup(1);
  for (const int32_t entry : {-1, 1}) {
    const auto session = OpenInStep(/*layers=*/0);
    auto done = AttendHeld(*session);
    group_->ReleaseOne([entry](const worker::StepCommand&, Outcome* outcome) {
      outcome->replies[0].conflicts = {entry};
    });
    EXPECT_TRUE(absl::IsInternal(done.get()));
    group_->Release();
  }
}

// Of a step in pieces: the entry that holds other tokens lies in the second one.
TEST_F(SessionFailureTest, AConflictInALaterPieceNamesItsEntry) {
  Serve(/*sequences=*/2);
  const auto two = [&](int64_t first_of_1, int64_t first_of_2, uint64_t seed) {
    Requests requests;
    for (int32_t layer = 0; layer < 2; ++layer) {
      v1::AttendRequest& request =
          requests.emplace_back(AttendOf(spec_, "m", 1, first_of_1, 8, layer, seed));
      v1::AttendEntry* second = request.add_entries();
      *second = request.entries(0);
      second->set_sequence_id(2);
      second->set_first_position(first_of_2);
      for (v1::AttendEntry& entry : *request.mutable_entries()) {
        entry.set_query_rows(4);
        entry.set_new_tokens(4);
      }
    }
    return requests;
  };
  int64_t held_by_1 = 0;
  for (const v1::SessionMemory memory : {v1::SESSION_MEMORY_HOST, v1::SESSION_MEMORY_MESSAGES}) {
    const auto session =
        OpenSessionAt(service_->address(), {.max_rows = 4, .max_new_tokens = 4, .memory = memory});
    for (const uint64_t seed : {1, 2}) {
      const Requests requests = two(held_by_1, /*first_of_2=*/0, seed);
      const auto step = session->Submit(StepOf(requests));
      ASSERT_TRUE(step.ok()) << step.status();
      for (const v1::AttendRequest& request : requests) {
        EXPECT_TRUE(AttendWith(*session, request, nullptr).ok());
      }
      const absl::Status ended = session->Await(*step);
      if (seed == 1) {
        EXPECT_TRUE(ended.ok()) << ended;
      } else {
        EXPECT_TRUE(absl::IsAlreadyExists(ended)) << ended;
        EXPECT_EQ(tributary::FieldOf(ended), "entries[1].first_position");
      }
      held_by_1 += 4;
    }
  }
}

TEST_F(SessionFailureTest, CloseInTheMidstOfAStepWaitsForItsBound) {
  Serve();
  const auto session = OpenInStep(/*layers=*/1, milliseconds(300));
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Close()));
  ExpectNothingHeld();
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, ADeletedCacheEndsItsSessions) {
  Serve();
  const auto session = OpenInStep(/*layers=*/1);
  grpc::ClientContext context;
  v1::DeleteCacheRequest request;
  request.set_cache_id("m");
  v1::DeleteCacheReply reply;
  ASSERT_TRUE(service_->stub().DeleteCache(&context, request, &reply).ok());
  const absl::Status why = AttendWith(*session, Tokens()[1], nullptr);
  EXPECT_TRUE(absl::IsNotFound(why)) << why;
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

TEST_F(SessionFailureTest, AServiceThatStopsEndsTheWaitsOfHosts) {
  ServeOverFakeGroup(1);
  const auto session = OpenInStep(/*layers=*/0);
  auto done = AttendHeld(*session);
  group_->Break("stopping");  // as a group does that is stopped
  service_.reset();
  const absl::Status why = done.get();
  EXPECT_FALSE(why.ok());
  EXPECT_LT(Clock::now() - begin_, kSoon);
}

// One session is broken off again and again while another one works.
TEST_F(SessionFailureTest, SessionsThatComeAndGoLeaveNothingBehind) {
  Serve(/*sequences=*/2);
  ModelHost model(&service_->stub(), "m", spec_, DType::kF32, 1);
  const auto steady = OpenSession();
  for (int i = 0; i < 100; ++i) {
    const auto session = OpenSession();
    ASSERT_NE(session, nullptr);
    ASSERT_TRUE(session->Submit(StepOf(Tokens())).ok());
    if (i % 3 != 0) {
      ASSERT_TRUE(AttendWith(*session, Tokens()[0], nullptr).ok());
    }
    if (i % 10 == 0) {
      RunStep(*steady, model, {model.MakeStep(0, {{2, 1}}), model.MakeStep(1, {{2, 1}})});
    }
  }
  ExpectNothingHeld();
}

}  // namespace
}  // namespace tributary::service::testing
