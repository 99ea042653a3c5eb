// Ranks as real processes that die (SIGKILL) or hang (SIGSTOP). Every survivor must end by itself,
// with the right error, in bounded time, and without ever having taken wrong data for right.
#include "tests/support/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/collective/peer_exit.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ChildProcess;
using testing::AnyOf;
using testing::Eq;
using Clock = std::chrono::steady_clock;

// Far more than anything here takes; a wait that ends there failed.
constexpr seconds kPatience(120);

struct Job {
  std::string transport = "gloo";  // or "tls"
  uint64_t epoch = 1;
  int size = 4;
  size_t words = 256;
  milliseconds deadline{20000};
  int operations = 0;  // 0: until something fails
};

class ProcessTest : public testing::Test {
 protected:
  void Start(const Job& job) {
    peers_.clear();
    for (int rank = 0; rank < job.size; ++rank) {
      peers_.push_back(std::make_unique<ChildProcess>(
          std::vector<std::string>{TRIBUTARY_PEER_PROCESS, job.transport, directory_.File("store"),
                                   std::to_string(job.epoch), std::to_string(rank),
                                   std::to_string(job.size), std::to_string(job.words),
                                   std::to_string(job.deadline.count()),
                                   std::to_string(job.operations)},
          directory_.File(std::to_string(job.epoch) + "-" + std::to_string(rank))));
    }
  }

  void AwaitAllAtWork() {
    for (auto& p : peers_) {
      ASSERT_TRUE(
          test::Eventually(kPatience, [&] { return p->Log().find("ready") != std::string::npos; }));
    }
  }

  // A group of the same ranks forms again, under the next epoch and in the same store.
  void ExpectReforms(Job job) {
    ++job.epoch;
    job.operations = 10;
    job.deadline = kPatience;
    Start(job);
    for (auto& p : peers_) EXPECT_EQ(p->Wait(kPatience), kExitDone);
  }

  test::TemporaryDirectory directory_;
  std::vector<std::unique_ptr<ChildProcess>> peers_;
};

class TransportTest : public ProcessTest, public testing::WithParamInterface<std::string> {};

TEST_P(TransportTest, FinishWhenNobodyFails) {
  for (const size_t words : {size_t{0}, size_t{1}, size_t{100000}}) {
    Start({.transport = GetParam(), .epoch = words + 1, .words = words, .operations = 50});
    for (auto& p : peers_) EXPECT_EQ(p->Wait(kPatience), kExitDone);
  }
}

// Large enough that a kill falls in the midst of a message.
#ifdef TRIBUTARY_SHORT_GRID
constexpr size_t kManyWords = 1 << 18;
#else
constexpr size_t kManyWords = 4 << 20;
#endif

struct KillCase {
  std::string transport;
  int size;
  int victim;
  size_t words;
};

class KillTest : public ProcessTest, public testing::WithParamInterface<KillCase> {};

// A dead process's sockets are closed, so its peers need not wait for the deadline: they must say
// that it is gone, not that it is late.
TEST_P(KillTest, EverySurvivorLosesThePeer) {
  const Job job{.transport = GetParam().transport,
                .size = GetParam().size,
                .words = GetParam().words,
                .deadline = seconds(20)};
  Start(job);
  AwaitAllAtWork();
  const Clock::time_point killed = Clock::now();
  peers_[GetParam().victim]->Signal(SIGKILL);
  for (int rank = 0; rank < job.size; ++rank) {
    EXPECT_EQ(peers_[rank]->Wait(kPatience),
              rank == GetParam().victim ? -SIGKILL : ExitCodeOf(StatusCode::kUnavailable))
        << "rank " << rank;
  }
  EXPECT_LT(Clock::now() - killed, 2 * job.deadline);
  ExpectReforms(job);
}

std::vector<KillCase> KillCases() {
  std::vector<KillCase> cases;
  for (const char* transport : {"gloo", "tls"}) {
    for (const auto& [size, victim, words] : std::vector<std::tuple<int, int, size_t>>{
             {2, 0, 64}, {4, 0, 64}, {4, 3, 64}, {4, 1, kManyWords}, {2, 1, kManyWords}}) {
      cases.push_back({transport, size, victim, words});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, KillTest, testing::ValuesIn(KillCases()), [](const auto& test) {
  return test.param.transport + "Rank" + std::to_string(test.param.victim) + "Of" +
         std::to_string(test.param.size) + "Words" + std::to_string(test.param.words);
});

// A stopped process keeps its sockets open: only the deadline tells.
TEST_P(TransportTest, AStoppedRankRunsIntoTheDeadline) {
  const Job job{.transport = GetParam(), .deadline = seconds(4)};
  Start(job);
  AwaitAllAtWork();
  const Clock::time_point stopped = Clock::now();
  constexpr int kVictim = 2;
  peers_[kVictim]->Pause();
  const int timed_out = ExitCodeOf(StatusCode::kDeadlineExceeded);
  const int lost = ExitCodeOf(StatusCode::kUnavailable);
  int deadlines = 0;
  for (int rank = 0; rank < job.size; ++rank) {
    if (rank == kVictim) continue;
    const std::optional<test::ExitCode> code = peers_[rank]->Wait(kPatience);
    // The first to reach its deadline closes its connections; others may see that before theirs.
    EXPECT_THAT(code, AnyOf(Eq(timed_out), Eq(lost))) << "rank " << rank;
    deadlines += code == timed_out;
  }
  EXPECT_GE(deadlines, 1);
  EXPECT_LT(Clock::now() - stopped, 2 * job.deadline + seconds(5));
  // When it wakes, the group is gone: it must not carry on alone.
  peers_[kVictim]->Resume();
  EXPECT_THAT(peers_[kVictim]->Wait(kPatience), AnyOf(Eq(timed_out), Eq(lost)));
  ExpectReforms(job);
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportTest, testing::Values("gloo", "tls"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tributary::collective
