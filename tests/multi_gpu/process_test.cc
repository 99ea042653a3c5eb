// Ranks as processes with a GPU each, that die (SIGKILL) or hang (SIGSTOP) in the midst of
// exchanges. Every survivor must end its step by itself, with an error, in bounded time, keep its
// GPU, and meet the others again under the next epoch; what a rank that wakes up late still stores
// must reach nobody.
#include "tests/support/process.h"

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "collective/exchange/exchange.h"
#include "tests/collective/peer_exit.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ChildProcess;

// Far more than anything here takes.
constexpr seconds kPatience(90);
constexpr milliseconds kDeadline(2000);
// An exchange that failed, NCCL's abort and the wait for the stream.
constexpr milliseconds kFailsWithin(12000);

int GpuCount() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

// Beside this test's program.
std::string PeerProgram() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "multi_gpu_peer_process";
}

struct Case {
  Strategy strategy;
  Placement placement;
};

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  return std::string(Name(info.param.strategy)) + "_" + Name(info.param.placement);
}

class ProcessTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    // Processes that share a GPU take turns on it and never meet.
    const int gpus = GpuCount();
    if (gpus < 2) GTEST_SKIP() << "needs 2 GPUs or more, this machine has " << gpus;
    size_ = gpus >= 4 ? 4 : 2;
  }
  void TearDown() override { peers_.clear(); }

  void Start(int rank, uint64_t first_epoch, uint64_t last_epoch, int operations, int rows = 4) {
    peers_.push_back(std::make_unique<ChildProcess>(
        std::vector<std::string>{
            PeerProgram(), directory_.File("store"), std::to_string(rank), std::to_string(size_),
            std::to_string(rank), Name(GetParam().strategy), Name(GetParam().placement),
            std::to_string(rows), std::to_string(kDeadline.count()), std::to_string(first_epoch),
            std::to_string(last_epoch), std::to_string(operations)},
        directory_.File("log" + std::to_string(peers_.size()))));
  }
  void StartAll(uint64_t first_epoch, uint64_t last_epoch, int operations, int rows = 4) {
    for (int rank = 0; rank < size_; ++rank) Start(rank, first_epoch, last_epoch, operations, rows);
  }

  void AwaitLine(int peer, const std::string& line) {
    ASSERT_TRUE(test::Eventually(
        kPatience, [&] { return peers_[peer]->Log().find(line) != std::string::npos; }))
        << "peer " << peer << " never said '" << line << "'";
  }
  void ExpectExit(int peer, int code) {
    const auto exit = peers_[peer]->Wait(kPatience);
    ASSERT_TRUE(exit.has_value()) << "peer " << peer << " still runs";
    EXPECT_EQ(*exit, code) << "peer " << peer;
  }

  // The survivors' step of epoch 1 failed in time, with an error that says so.
  void ExpectSurvivorsFailed(int victim) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == victim) continue;
      AwaitLine(rank, "failed 1 ");
      if (HasFatalFailure()) return;
      const std::string log = peers_[rank]->Log();
      std::istringstream line(log.substr(log.find("failed 1 ") + 9));
      int code = 0;
      int64_t took = 0;
      line >> code >> took;
      EXPECT_THAT(code, testing::AnyOf(ExitCodeOf(StatusCode::kDeadlineExceeded),
                                       ExitCodeOf(StatusCode::kUnavailable)))
          << "rank " << rank;
      EXPECT_LT(milliseconds(took), kFailsWithin) << "rank " << rank;
    }
  }

  int size_ = 2;
  test::TemporaryDirectory directory_;
  std::vector<std::unique_ptr<ChildProcess>> peers_;
};

TEST_P(ProcessTest, AThousandSteps) {
  StartAll(1, 1, 1000);
  for (int rank = 0; rank < size_; ++rank) ExpectExit(rank, kExitDone);
}

TEST_P(ProcessTest, SurvivorsOfAKilledRankFormTheNextEpoch) {
  StartAll(1, 2, 50);
  for (int rank = 0; rank < size_; ++rank) AwaitLine(rank, "ready 1");
  if (HasFatalFailure()) return;
  const int victim = size_ - 1;
  peers_[victim]->Signal(SIGKILL);
  ExpectExit(victim, -SIGKILL);
  ExpectSurvivorsFailed(victim);
  if (HasFatalFailure()) return;
  Start(victim, 2, 2, 50);
  for (int peer = 0; peer <= size_; ++peer) {
    if (peer != victim) ExpectExit(peer, kExitDone);
  }
}

TEST_P(ProcessTest, AStoppedRankWakesUpToNoEffect) {
  for (int rank = 0; rank < size_ - 1; ++rank) Start(rank, 1, 2, 3000);
  Start(size_ - 1, 1, 1, 0);  // the victim: whoever hands out epochs would not give it another
  for (int rank = 0; rank < size_; ++rank) AwaitLine(rank, "ready 1");
  if (HasFatalFailure()) return;
  const int victim = size_ - 1;
  peers_[victim]->Pause();
  ExpectSurvivorsFailed(victim);
  if (HasFatalFailure()) return;
  // Another process takes its place, and it wakes while the others exchange.
  Start(victim, 2, 2, 3000);
  AwaitLine(0, "ready 2");
  if (HasFatalFailure()) return;
  peers_[victim]->Resume();
  const auto woken = peers_[victim]->Wait(kPatience);
  ASSERT_TRUE(woken.has_value());
  EXPECT_THAT(*woken, testing::AnyOf(ExitCodeOf(StatusCode::kDeadlineExceeded),
                                     ExitCodeOf(StatusCode::kUnavailable)));
  for (int peer = 0; peer <= size_; ++peer) {
    if (peer != victim) ExpectExit(peer, kExitDone);
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, ProcessTest,
                         testing::Values(Case{Strategy::kDirect, Placement::kScattered},
                                         Case{Strategy::kDirect, Placement::kGathered},
                                         Case{Strategy::kA2a, Placement::kScattered}),
                         NameOf);

}  // namespace
}  // namespace tributary::collective
