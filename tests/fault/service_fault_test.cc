// A coordinator and four workers as processes, under load, while processes die, hang, leave and
// come back. Every reply is checked against float64 attention by the hosts themselves (load.h).

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "tests/fault/fleet.h"
#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/service/raw_call.h"
#include "tests/support/process.h"

namespace tributary::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kWorkers = 4;

using ServiceFault = Fleet;

constexpr int kLong = 4;
constexpr int kShort = 4;

// ---- right numbers -----------------------------------------------------------------------------

TEST_F(ServiceFault, DecodeVerifyPrefillForkTruncate) {
  SequenceHost parent(stub_, 1), child(stub_, 2), other(stub_, 3);
  ASSERT_TRUE(parent.Open().ok());
  ASSERT_TRUE(other.Open().ok());
  for (const int rows : {1, 2, 100, 1, 4, 16, 63, 1, 200}) EXPECT_TRUE(parent.Step(rows).ok());
  EXPECT_TRUE(parent.Look(3).ok());
  EXPECT_TRUE(parent.Fork(&child, 70).ok());
  EXPECT_TRUE(child.Step(5).ok());
  EXPECT_TRUE(parent.Step(3).ok());
  EXPECT_TRUE(parent.Look(350).ok());
  EXPECT_TRUE(parent.Truncate(37).ok());
  EXPECT_TRUE(other.Step(90).ok());  // over pages the parent gave back
  EXPECT_TRUE(parent.Step(9).ok());
  EXPECT_TRUE(child.Look(75).ok());
  EXPECT_TRUE(other.Look(90).ok());
  EXPECT_EQ(parent.length(), 46);
  const v1::GetTopologyReply topology = Topology();
  EXPECT_EQ(topology.epoch(), 1u);
  ASSERT_EQ(topology.workers_size(), kWorkers);
  for (const v1::WorkerInfo& worker : topology.workers()) EXPECT_TRUE(worker.connected());
}

// ---- death and pauses --------------------------------------------------------------------------

TEST_F(ServiceFault, AKilledWorkerUnderLoad) {
  Load load(stub_, kLong, kShort);
  ASSERT_NO_FATAL_FAILURE(KillUnderLoad(load, 3));
  for (int host = 0; host < kLong; ++host) EXPECT_EQ(load.counts(host).lost, 1) << host;
  // What had no token on rank 3 is still there.
  for (int host = kLong; host < kLong + kShort; ++host)
    EXPECT_EQ(load.counts(host).lost, 0) << host;
  ExpectPagesAccountedFor(load.hosts());
}

TEST_F(ServiceFault, LostSequencesSayDataLossUntilOpenedAgain) {
  SequenceHost held(stub_, 1), lost(stub_, 2);
  ASSERT_TRUE(held.Open().ok() && held.Step(48).ok());  // ranks 0, 1 and 2
  ASSERT_TRUE(lost.Open().ok() && lost.Step(49).ok());  // and a token on rank 3
  workers_[3]->Signal(SIGKILL);
  ASSERT_TRUE(WaitForming());
  EXPECT_EQ(held.Look(1).error_code(), grpc::StatusCode::UNAVAILABLE);
  workers_[3] = Worker(3);
  ASSERT_TRUE(WaitReady(2));

  EXPECT_TRUE(held.Look(48).ok());
  EXPECT_TRUE(held.Step(20).ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(lost.Look(1).error_code(), grpc::StatusCode::DATA_LOSS);
    EXPECT_EQ(lost.Step(1).error_code(), grpc::StatusCode::DATA_LOSS);
  }
  EXPECT_EQ(Topology().caches(0).sequences_lost(), 1);
  ASSERT_TRUE(lost.Open().ok());
  lost.Forget();
  EXPECT_TRUE(lost.Step(70).ok());
  EXPECT_TRUE(lost.Look(70).ok());
  EXPECT_EQ(Topology().caches(0).sequences_lost(), 0);
}

TEST_F(ServiceFault, APausedWorkerUnderLoad) {
  Load load(stub_, kLong, kShort);
  ASSERT_NO_FATAL_FAILURE(PauseUnderLoad(load, 1));
  for (int host = 0; host < kLong + kShort; ++host) EXPECT_EQ(load.counts(host).lost, 0) << host;
  ExpectPagesAccountedFor(load.hosts());
}

TEST_F(ServiceFault, ARestartedCoordinatorKnowsNothing) {
  SequenceHost before(stub_, 1);
  ASSERT_TRUE(before.Open().ok() && before.Step(70).ok());
  coordinator_->Signal(SIGKILL);
  ASSERT_EQ(coordinator_->Wait(seconds(10)), -SIGKILL);
  Coordinate();
  ASSERT_TRUE(WaitReady(1));

  grpc::Status no_cache;
  ASSERT_TRUE(Eventually(kPatience, [&] {
    no_cache = before.Look(1);
    return no_cache.error_code() != grpc::StatusCode::UNAVAILABLE;
  }));
  EXPECT_EQ(no_cache.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(FieldOf(no_cache), "cache_id");
  ASSERT_TRUE(CreateCache().ok());
  EXPECT_EQ(before.Look(1).error_code(), grpc::StatusCode::NOT_FOUND);
  SequenceHost after(stub_, 1);
  ASSERT_TRUE(after.Open().ok());
  EXPECT_TRUE(after.Step(70).ok());
  EXPECT_TRUE(after.Look(70).ok());
  // The workers let go of what nobody knows any more: one cache each.
  const uint64_t one_cache = uint64_t{2} * 2 * 64 * 2 * 8'192 / kWorkers;
  ASSERT_TRUE(Eventually(kPatience, [&] { return Topology().workers(0).memory_bytes() > 0; }));
  const v1::GetTopologyReply topology = Topology();
  for (const v1::WorkerInfo& worker : topology.workers()) {
    EXPECT_LT(worker.memory_bytes(), 2 * one_cache) << worker.rank();
  }
}

// ---- leaving and joining -----------------------------------------------------------------------

TEST_F(ServiceFault, AWorkerThatIsAskedToLeavesInPeace) {
  Load load(stub_, kLong, kShort);
  ASSERT_TRUE(load.WaitOk(5));
  workers_[3]->Signal(SIGTERM);
  EXPECT_EQ(workers_[3]->Wait(seconds(20)), 0);
  EXPECT_THAT(workers_[3]->Log(), HasSubstr("drained"));
  ASSERT_TRUE(WaitForming());
  workers_[3] = Worker(3);
  ASSERT_TRUE(WaitReady(2));
  ASSERT_TRUE(load.WaitOk(5));
  load.Stop();
  for (int host = kLong; host < kLong + kShort; ++host)
    EXPECT_EQ(load.counts(host).lost, 0) << host;
}

TEST_F(ServiceFault, WorkersLeaveInPeaceWhileTheirGroupForms) {
  LeaveWhileForming(3, milliseconds(50));
  SequenceHost host(stub_, 1);
  ASSERT_TRUE(host.Open().ok());
  EXPECT_TRUE(host.Step(70).ok());
}

TEST_F(ServiceFault, ASecondSignalEndsAWorkerAtOnce) {
  coordinator_->Pause();  // nobody lets the worker go
  workers_[0]->Signal(SIGTERM);
  ASSERT_TRUE(Eventually(kPatience,
                         [&] { return workers_[0]->Log().find("draining") != std::string::npos; }));
  workers_[0]->Signal(SIGTERM);
  EXPECT_EQ(workers_[0]->Wait(seconds(10)), 128 + SIGTERM);
  coordinator_->Resume();
}

TEST_F(ServiceFault, AWorkerStandsByForARankThatIsHeld) {
  const auto spare = std::make_unique<ChildProcess>(
      std::vector<std::string>{workers_[2]->program(), "--coordinator=" + WorkerAddress(directory_),
                               "--rank=2", "--threads=1"},
      directory_.File("spare.log"));
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return spare->Log().find("refused: rank: another live worker holds rank 2") !=
           std::string::npos;
  }));
  EXPECT_EQ(Topology().epoch(), 1u);
  workers_[2]->Signal(SIGKILL);
  ASSERT_TRUE(WaitReady(2));
  SequenceHost host(stub_, 1);
  ASSERT_TRUE(host.Open().ok());
  EXPECT_TRUE(host.Step(70).ok());
}

TEST_F(ServiceFault, AWorkerThatCannotFitSaysWhyAndEnds) {
  const auto misfit = Worker(9, {"--world_size=3", "--rank=-1"});
  EXPECT_EQ(misfit->Wait(seconds(20)), 1);
  EXPECT_THAT(misfit->Log(), HasSubstr("world_size"));
  const auto lost = Worker(8, {"--no_such_setting"});
  EXPECT_NE(lost->Wait(seconds(20)), 0);
  EXPECT_THAT(lost->Log(), HasSubstr("no_such_setting"));
  const auto unknown = Worker(7, {"--device=abacus", "--rank=-1"});
  EXPECT_EQ(unknown->Wait(seconds(20)), 2);
  EXPECT_THAT(unknown->Log(), HasSubstr("--device"));
  // Without a GPU the worker says so; with one, this group's workers compute on another device.
  const auto gpu = Worker(6, {"--device=cuda", "--rank=-1"});
  EXPECT_EQ(gpu->Wait(seconds(20)), 1);
  EXPECT_THAT(gpu->Log(), AnyOf(HasSubstr("--device=cuda: "), HasSubstr("backend")));
  EXPECT_EQ(Topology().epoch(), 1u);
}

TEST_F(ServiceFault, AnAddressInUseEndsWhoComesSecond) {
  const std::string socket = "unix:" + directory_.File("admin.sock");
  const auto first = Worker(5, {"--rank=-1", "--admin_listen=127.0.0.1:0"});
  const auto also = Worker(6, {"--rank=-1", "--admin_listen=" + socket});
  std::string port;
  ASSERT_TRUE(Eventually(kPatience, [&] {
    const std::string log = first->Log();
    std::smatch match;
    if (!std::regex_search(log, match, std::regex("admin: .* port=([0-9]+)"))) return false;
    port = match[1];
    return also->Log().find("admin: listening") != std::string::npos;
  }));
  for (const std::string& taken : {"127.0.0.1:" + port, socket}) {
    const auto second = Worker(7, {"--rank=-1", "--admin_listen=" + taken});
    EXPECT_EQ(second->Wait(seconds(20)), 1) << taken;
    EXPECT_THAT(second->Log(), HasSubstr("--admin_listen: cannot listen at " + taken));
  }
  // Workers would find the one or the other.
  const TemporaryDirectory other;
  const auto second = StartCoordinator(other, 1, {"--worker_listen=" + WorkerAddress(directory_)});
  EXPECT_EQ(second->Wait(seconds(20)), 1);
  EXPECT_THAT(second->Log(), HasSubstr("cannot listen for workers"));
  EXPECT_EQ(Topology().epoch(), 1u) << "nobody else is harmed";
}

// ---- health ------------------------------------------------------------------------------------

std::string HealthOf(const std::string& address, const std::string& service) {
  return service::testing::CheckHealth(address, service).bytes;
}

TEST_F(ServiceFault, AWorkerIsReadyWhileItsGroupIs) {
  using service::testing::kNotServing;
  using service::testing::kServing;
  workers_[0]->Signal(SIGKILL);
  workers_[0] = Worker(0, {"--admin_listen=unix:" + directory_.File("admin.sock")});
  const std::string admin = "unix:" + directory_.File("admin.sock");
  ASSERT_TRUE(WaitReady(2));
  EXPECT_EQ(HealthOf(admin, "readiness"), kServing);
  EXPECT_EQ(HealthOf(admin, "liveness"), kServing);
  workers_[1]->Signal(SIGKILL);
  EXPECT_TRUE(Eventually(kPatience, [&] { return HealthOf(admin, "readiness") == kNotServing; }));
  EXPECT_EQ(HealthOf(admin, "liveness"), kServing);  // no reason to restart this one
  workers_[1] = Worker(1);
  EXPECT_TRUE(Eventually(kPatience, [&] { return HealthOf(admin, "readiness") == kServing; }));
}

}  // namespace
}  // namespace tributary::test
