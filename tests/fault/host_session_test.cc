// Sessions in shared memory over worker processes, while processes die, hang and come back: results
// are right, every wait of the host ends by its bound, and a new session goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/fault/fleet.h"
#include "tests/service/model_host.h"
#include "tests/service/session_host.h"
#include "tests/service/test_service.h"

namespace tributary::test {
namespace {

using client::HostSession;
using service::testing::AttendOf;
using service::testing::AttendWith;
using service::testing::ModelHost;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Requests = std::vector<v1::AttendRequest>;

class HostSessionFault : public Fleet {
 protected:
  HostSessionFault() : Fleet({.workers = 2}) {}

  void Prepare() {
    ASSERT_TRUE(service::testing::CreateCache(*stub_, "m", spec_).ok());
    for (const uint64_t id : {1, 2}) ASSERT_TRUE(service::testing::Open(*stub_, "m", id).ok());
  }
  std::unique_ptr<HostSession> OpenHere(milliseconds wait_timeout = seconds(60)) const {
    return service::testing::OpenSessionAt(PublicAddress(directory_),
                                           {.max_rows = 128,
                                            .max_new_tokens = 128,
                                            .wait_timeout = wait_timeout,
                                            .memory = v1::SESSION_MEMORY_HOST});
  }
  Requests Tokens() const {
    return {AttendOf(spec_, "m", 1, 0, 4, 0), AttendOf(spec_, "m", 1, 0, 4, 1)};
  }
  // In another thread, until the session is over; a layer in flight or between two, as it comes.
  static std::future<absl::Status> Drive(HostSession& session, v1::CacheSpec spec) {
    return std::async(std::launch::async, [&session, spec] {
      for (int64_t at = 0;; ++at) {
        const Requests step = {AttendOf(spec, "m", 2, at, 1, 0), AttendOf(spec, "m", 2, at, 1, 1)};
        if (const absl::Status s = session.Submit(service::testing::StepOf(step)).status();
            !s.ok()) {
          return s;
        }
        for (const v1::AttendRequest& request : step) {
          if (absl::Status s = AttendWith(session, request, nullptr); !s.ok()) return s;
        }
      }
    });
  }

  const v1::CacheSpec spec_ = service::testing::SmallSpec();
};

TEST_F(HostSessionFault, StepsGiveWhatTheReferenceGives) {
  Prepare();
  ModelHost model(stub_.get(), "m", spec_, DType::kF32, 1);
  const auto session = OpenHere();
  ASSERT_NE(session, nullptr);
  const auto step = [&](const std::vector<std::pair<uint64_t, int32_t>>& entries) {
    RunStep(*session, model, {model.MakeStep(0, entries), model.MakeStep(1, entries)});
  };
  step({{1, 100}, {2, 20}});
  for (int i = 0; i < 10; ++i) step({{1, 1}, {2, 4}});
  EXPECT_TRUE(session->Close().ok());
}

TEST_F(HostSessionFault, AKilledWorkerEndsTheSessionAndAnotherOneGoesOn) {
  Prepare();
  const auto session = OpenHere();
  ASSERT_NE(session, nullptr);
  auto why = Drive(*session, spec_);
  std::this_thread::sleep_for(milliseconds(200));
  workers_[1]->Signal(SIGKILL);
  ASSERT_EQ(why.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(absl::IsAborted(why.get())) << session->status();
  workers_[1] = Worker(1);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(service::testing::Open(*stub_, "m", 3).ok());
  ModelHost model(stub_.get(), "m", spec_, DType::kF32, 1);
  const auto next = OpenHere();
  ASSERT_NE(next, nullptr);
  RunStep(*next, model, {model.MakeStep(0, {{3, 5}}), model.MakeStep(1, {{3, 5}})});
}

TEST_F(HostSessionFault, AStoppedWorkerEndsTheHostsWaitByItsBound) {
  Prepare();
  const auto session = OpenHere(seconds(1));
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(session->Submit(service::testing::StepOf(Tokens())).ok());
  workers_[0]->Pause();
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status why = AttendWith(*session, Tokens()[0], nullptr);
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(8));
  workers_[0]->Resume();
}

TEST_F(HostSessionFault, AKilledCoordinatorEndsTheWaitsAndItsSocketIsTakenOver) {
  Prepare();
  const auto busy = OpenHere();
  const auto waiting = OpenHere();
  ASSERT_TRUE(busy != nullptr && waiting != nullptr);
  auto why = Drive(*busy, spec_);
  ASSERT_TRUE(waiting->Submit(service::testing::StepOf(Tokens())).ok());
  workers_[0]->Pause();  // the layer stays where it is
  auto asleep =
      std::async(std::launch::async, [&] { return AttendWith(*waiting, Tokens()[0], nullptr); });
  std::this_thread::sleep_for(milliseconds(200));
  coordinator_->Signal(SIGKILL);
  ASSERT_EQ(why.wait_for(kPatience), std::future_status::ready);
  ASSERT_EQ(asleep.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(absl::IsUnavailable(why.get())) << busy->status();
  EXPECT_TRUE(absl::IsUnavailable(asleep.get())) << waiting->status();
  workers_[0]->Resume();
  // The sockets of the dead one lie there still.
  Coordinate();
  ASSERT_TRUE(WaitReady(1));
  Prepare();
  ModelHost model(stub_.get(), "m", spec_, DType::kF32, 1);
  const auto next = OpenHere();
  ASSERT_NE(next, nullptr);
  RunStep(*next, model, {model.MakeStep(0, {{1, 5}}), model.MakeStep(1, {{1, 5}})});
}

}  // namespace
}  // namespace tributary::test
