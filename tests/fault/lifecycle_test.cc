// How the real programs begin and end: what their health says meanwhile, that accepted calls are
// answered, that nothing hangs on a peer that is gone, and the exit codes.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "service/cli/health_check.h"
#include "tests/fault/load.h"
#include "tests/fault/programs.h"
#include "tests/support/process.h"
#include "tests/support/usage.h"

namespace tributary::test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

// For anything to come about on a busy machine; nothing waits so long when all is well.
constexpr seconds kPatience{60};
// Much less than the timeouts that tests set and that must not be waited for.
constexpr seconds kSoon{20};
constexpr int kRanks = 2;

// The exit code of a process that a second signal ended at once, and so with threads that run.
// ThreadSanitizer has a code of its own for that.
auto IsEndedBy(int signal) {
  constexpr int kOfThreadSanitizer = 66;
  return ::testing::AnyOf(::testing::Optional(128 + signal),
                          ::testing::Optional(kInstrumented ? kOfThreadSanitizer : 128 + signal));
}

class Lifecycle : public ::testing::Test {
 protected:
  void Coordinate(std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), "--admin_listen=" + Admin("coordinator"));
    coordinator_ = StartCoordinator(directory_, kRanks, std::move(flags));
  }
  std::unique_ptr<ChildProcess> Worker(int rank, std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), "--admin_listen=" + Admin(std::to_string(rank)));
    return StartWorker(directory_, WorkerAddress(directory_), rank, std::move(flags));
  }
  void StartAll(std::vector<std::string> flags = {}) {
    Coordinate(std::move(flags));
    for (int rank = 0; rank < kRanks; ++rank) workers_.push_back(Worker(rank));
    ASSERT_TRUE(BecomesReady("coordinator"));
    stub_ = ConnectTo(PublicAddress(directory_));
    v1::CreateCacheRequest request;
    request.set_cache_id(kCacheId);
    *request.mutable_spec() = PublicSpec();
    grpc::ClientContext context;
    v1::CreateCacheReply reply;
    ASSERT_TRUE(stub_->CreateCache(&context, request, &reply).ok());
  }

  std::string Admin(const std::string& of) const {
    return "unix:" + directory_.File("admin-" + of + ".sock");
  }
  // False also when nobody answers.
  bool Serving(const std::string& of, const std::string& service) const {
    const auto channel = grpc::CreateChannel(Admin(of), grpc::InsecureChannelCredentials());
    return cli::CheckHealth(channel, service, seconds(5)).value_or(false);
  }
  bool Live(const std::string& of) const { return Serving(of, "liveness"); }
  bool Ready(const std::string& of) const { return Serving(of, "readiness"); }
  bool BecomesReady(const std::string& of) const {
    return Eventually(kPatience, [&] { return Ready(of); });
  }
  bool CeasesToBeReady(const std::string& of) const {
    return Eventually(kPatience, [&] { return !Ready(of); });
  }

  uint64_t CallsOpen() const {
    grpc::ClientContext context;
    v1::GetTopologyReply reply;
    if (!stub_->GetTopology(&context, {}, &reply).ok()) return 0;
    return reply.statistics().calls_open();
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::vector<std::unique_ptr<ChildProcess>> workers_;
  std::shared_ptr<v1::AttentionService::Stub> stub_;
};

// ----------------------------------------------------------------------------------------- health

// Hosts and workers connect to different addresses, and both answer whoever mixes them up.
TEST_F(Lifecycle, AWorkerThatDialsTheAddressOfHostsIsToldWhichOneItIs) {
  Coordinate();
  ASSERT_TRUE(Eventually(kPatience, [&] { return Live("coordinator"); }));
  const auto worker = StartWorker(directory_, PublicAddress(directory_), 0, {});
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return worker->Log().find("must be the coordinator's --worker_listen") != std::string::npos;
  }));
}

TEST_F(Lifecycle, LivenessIsOnesOwnAndReadinessTheGroups) {
  workers_.push_back(Worker(0));
  ASSERT_TRUE(Eventually(kPatience, [&] { return Live("0"); })) << "nobody else is there";
  EXPECT_FALSE(Ready("0"));
  Coordinate();
  ASSERT_TRUE(Eventually(kPatience, [&] { return Live("coordinator"); }));
  ASSERT_TRUE(Eventually(kPatience, [&] {
    return workers_[0]->Log().find("registered as rank") != std::string::npos;
  }));
  EXPECT_FALSE(Ready("coordinator")) << "one of two";
  EXPECT_FALSE(Ready("0"));
  workers_.push_back(Worker(1));
  EXPECT_TRUE(BecomesReady("coordinator"));
  EXPECT_TRUE(BecomesReady("0"));
  EXPECT_TRUE(BecomesReady("1"));

  workers_[1]->Signal(SIGKILL);
  EXPECT_TRUE(CeasesToBeReady("coordinator"));
  EXPECT_TRUE(CeasesToBeReady("0")) << "its epoch is over";
  EXPECT_TRUE(Live("coordinator"));
  EXPECT_TRUE(Live("0"));
  workers_[1]->Wait(kPatience);
  workers_[1] = Worker(1);
  EXPECT_TRUE(BecomesReady("coordinator"));
  EXPECT_TRUE(BecomesReady("0"));

  coordinator_->Signal(SIGKILL);
  for (const char* worker : {"0", "1"}) {
    EXPECT_TRUE(CeasesToBeReady(worker));
    EXPECT_TRUE(Live(worker)) << "restarting it would not bring the coordinator back";
  }
}

// ------------------------------------------------------------------------------------------- ends

TEST_F(Lifecycle, ADrainingCoordinatorIsNotReadyAndAnswersWhatItAccepted) {
  StartAll({"--batch_window=1s"});  // so that a call is open for a while
  SequenceHost host(stub_, 1);
  ASSERT_TRUE(host.Open().ok());
  // (The call that opened it may have been answered and still be counted.)
  EXPECT_TRUE(Eventually(kPatience, [&] { return CallsOpen() == 0; }));
  grpc::Status accepted;
  std::thread call([&] { accepted = host.Step(1); });
  EXPECT_TRUE(Eventually(kPatience, [&] { return CallsOpen() > 0; }));
  coordinator_->Signal(SIGTERM);
  EXPECT_TRUE(CeasesToBeReady("coordinator"));
  call.join();
  EXPECT_TRUE(accepted.ok()) << accepted.error_message();
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
  EXPECT_THAT(coordinator_->Log(), Not(HasSubstr("still in flight")));
  for (const char* worker : {"0", "1"}) {
    EXPECT_TRUE(CeasesToBeReady(worker));
    EXPECT_TRUE(Live(worker));
  }
}

TEST_F(Lifecycle, UnderLoadNoAcceptedCallFails) {
  StartAll({"--drain_settle=3s"});  // every host comes back in time to be told
  constexpr int kHosts = 6;
  std::atomic<int> answered{0};
  std::vector<std::thread> hosts;
  for (int i = 0; i < kHosts; ++i) {
    hosts.emplace_back([&, i] {
      const auto stub = ConnectTo(PublicAddress(directory_));
      SequenceHost host(stub, 1 + i);
      if (!host.Open().ok()) return ADD_FAILURE() << "cannot open";
      for (;;) {
        const grpc::Status status = host.Step(1);
        if (!status.ok()) {
          EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
          EXPECT_THAT(status.error_message(), HasSubstr("the service is shutting down"));
          return;
        }
        ++answered;
      }
    });
  }
  EXPECT_TRUE(Eventually(kPatience, [&] { return answered > 10 * kHosts; }));
  coordinator_->Signal(SIGTERM);
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
}

// Not even with gRPC's own shutdown, which resets calls that come meanwhile: CANCELLED.
TEST_F(Lifecycle, CallersThatNeverCeaseSeeNothingButUnavailable) {
  for (int life = 0; life < 3; ++life) {
    const TemporaryDirectory directory;
    coordinator_ = StartEmbedded(
        directory, 1,
        {"--listen=" + PublicAddress(directory) + ",127.0.0.1:0", "--drain_settle=20ms"});
    std::string tcp;
    ASSERT_TRUE(Eventually(kPatience, [&] {
      std::smatch found;
      const std::string log = coordinator_->Log();
      if (!std::regex_search(log, found, std::regex(R"(sock,(127\.0\.0\.1:\d+))"))) return false;
      tcp = found[1];
      return true;
    })) << coordinator_->Log();
    std::atomic<bool> over{false};
    std::atomic<int> answered{0};
    std::vector<std::thread> callers;
    for (int i = 0; i < 6; ++i) {
      callers.emplace_back([&, address = i % 2 == 0 ? tcp : PublicAddress(directory)] {
        const auto stub = ConnectTo(address);
        while (!over) {
          grpc::ClientContext context;
          context.set_deadline(std::chrono::system_clock::now() + kSoon);
          v1::OpenSequenceReply reply;
          const grpc::Status status = stub->OpenSequence(&context, {}, &reply);
          // The cache is unknown as long as calls are served.
          if (status.error_code() == grpc::StatusCode::NOT_FOUND ||
              status.error_code() == grpc::StatusCode::INVALID_ARGUMENT) {
            ++answered;
          } else {
            EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
          }
        }
      });
    }
    EXPECT_TRUE(Eventually(kPatience, [&] { return answered > 200; }));
    coordinator_->Signal(SIGTERM);
    EXPECT_EQ(coordinator_->Wait(kPatience), 0);
    over = true;
    for (std::thread& caller : callers) caller.join();
    EXPECT_THAT(coordinator_->Log(), Not(HasSubstr("error")));
  }
}

TEST_F(Lifecycle, AWorkerThatLeavesSaysSoBeforeItIsGone) {
  StartAll();
  coordinator_->Pause();  // it cannot let the worker go
  workers_[0]->Signal(SIGTERM);
  EXPECT_TRUE(CeasesToBeReady("0"));
  EXPECT_TRUE(Live("0"));
  coordinator_->Resume();
  EXPECT_EQ(workers_[0]->Wait(kPatience), 0);
}

TEST_F(Lifecycle, PeersThatAreGoneOrHangHoldNobody) {
  StartAll({"--step_timeout=2s", "--drain_timeout=1h"});
  SequenceHost host(stub_, 1);
  ASSERT_TRUE(host.Open().ok());
  // A worker hangs in the middle of a step: the step's deadline ends the drain.
  workers_[1]->Pause();
  EXPECT_TRUE(Eventually(kPatience, [&] { return CallsOpen() == 0; }));
  grpc::Status status;
  std::thread call([&] { status = host.Step(1); });
  EXPECT_TRUE(Eventually(kPatience, [&] { return CallsOpen() > 0; }));
  coordinator_->Signal(SIGTERM);
  call.join();
  EXPECT_THAT(status.error_code(),
              ::testing::AnyOf(grpc::StatusCode::ABORTED, grpc::StatusCode::UNAVAILABLE));
  EXPECT_EQ(coordinator_->Wait(kPatience), 0);
  // The worker's peers and coordinator are gone.
  workers_[0]->Signal(SIGTERM);
  EXPECT_EQ(workers_[0]->Wait(kSoon), 0);
}

TEST_F(Lifecycle, ACoordinatorThatHangsDoesNotHoldAWorkerLongerThanItsTimeout) {
  Coordinate();
  for (int rank = 0; rank < kRanks; ++rank)
    workers_.push_back(Worker(rank, {"--drain_timeout=1s"}));
  ASSERT_TRUE(BecomesReady("0"));
  coordinator_->Pause();
  workers_[0]->Signal(SIGTERM);
  EXPECT_EQ(workers_[0]->Wait(kPatience), 0);
  coordinator_->Signal(SIGKILL);
  workers_[1]->Signal(SIGTERM);
  EXPECT_EQ(workers_[1]->Wait(kPatience), 0);
}

TEST_F(Lifecycle, SigtermWhileTheGroupForms) {
  Coordinate({"--form_timeout=1h"});
  workers_.push_back(Worker(0));
  const auto registered = [&](int rank) {
    return Eventually(kPatience, [&] {
      return workers_[rank]->Log().find("registered as rank") != std::string::npos;
    });
  };
  ASSERT_TRUE(registered(0));
  workers_[0]->Pause();  // the other one will wait for its address
  workers_.push_back(Worker(1));
  ASSERT_TRUE(registered(1));
  workers_[1]->Signal(SIGTERM);
  EXPECT_EQ(workers_[1]->Wait(kSoon), 0);
  workers_[1] = Worker(1);
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(kSoon), 0);
}

TEST_F(Lifecycle, HelpExplainsEverySettingOfAWorker) {
  auto worker = Worker(0, {"--help"});
  EXPECT_EQ(worker->Wait(kPatience), 0);
  EXPECT_THAT(worker->Log(), HasSubstr("tributary-worker: One worker of Tributary"));
  for (const char* setting : {"--coordinator", "--rank=-1", "--device=cpu", "--drain_timeout"}) {
    EXPECT_THAT(worker->Log(), HasSubstr(setting));
  }
  EXPECT_THAT(worker->Log(), Not(HasSubstr("flagfile"))) << "a library's";
}

TEST_F(Lifecycle, ASecondSignalEndsAtOnce) {
  StartAll({"--step_timeout=1h", "--drain_timeout=1h"});
  workers_.push_back(nullptr);
  SequenceHost host(stub_, 1);
  ASSERT_TRUE(host.Open().ok());
  workers_[1]->Pause();
  std::thread call([&] { EXPECT_FALSE(host.Step(1).ok()); });
  EXPECT_TRUE(Eventually(kPatience, [&] { return CallsOpen() > 0; }));
  const auto draining = [](const ChildProcess& process) {
    return Eventually(kPatience,
                      [&] { return process.Log().find("draining") != std::string::npos; });
  };
  coordinator_->Signal(SIGTERM);
  EXPECT_TRUE(draining(*coordinator_));
  EXPECT_EQ(coordinator_->Wait(std::chrono::milliseconds(200)), std::nullopt) << "a call is open";
  coordinator_->Signal(SIGTERM);
  EXPECT_THAT(coordinator_->Wait(kSoon), IsEndedBy(SIGTERM));
  call.join();

  // A worker that waits for a coordinator which does not answer.
  Coordinate();
  workers_[1]->Resume();
  ASSERT_TRUE(BecomesReady("0"));
  coordinator_->Pause();
  workers_[0]->Signal(SIGTERM);
  EXPECT_TRUE(draining(*workers_[0]));
  workers_[0]->Signal(SIGINT);
  EXPECT_THAT(workers_[0]->Wait(kSoon), IsEndedBy(SIGINT));
  coordinator_->Resume();
}

}  // namespace
}  // namespace tributary::test
