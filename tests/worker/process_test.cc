// The same scripts with ranks that are processes and share nothing but sockets.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/gloo/gloo.h"
#include "collective/rendezvous/file_rendezvous.h"
#include "tests/worker/ranks.h"
#include "tests/worker/scenarios.h"

namespace tributary::worker::testing {
namespace {

constexpr int kRanks = 4;
constexpr uint64_t kEpoch = 3;
constexpr unsigned kPatienceSeconds = 100;

// The one rank of this process. Every process runs the script in step; rank 0 sees the results.
class ProcessRank : public Ranks {
 public:
  ProcessRank(const ExecutorOptions& options, std::unique_ptr<collective::Communicator> comm)
      : rank_(comm->rank()), executor_(options, std::make_shared<cpu::ThreadPool>(1)) {
    executor_.Join(std::move(comm));
  }

  int size() const override { return kRanks; }
  uint64_t epoch() const override { return kEpoch; }
  std::map<int, Reply> Execute(const Command& command) override {
    std::map<int, Reply> replies;
    replies.emplace(rank_, executor_.Execute(command));
    return replies;
  }

 private:
  int rank_;
  Executor executor_;
};

using Script = std::function<void(Ranks&)>;

std::unique_ptr<collective::Communicator> Connect(int rank, const std::string& directory) {
  collective::FileRendezvous rendezvous(directory);
  std::unique_ptr<collective::Communicator> comm;
  const Status status = collective::CreateGlooCommunicator(
      {.rank = rank, .size = kRanks, .epoch = kEpoch}, rendezvous,
      std::chrono::steady_clock::now() + std::chrono::seconds(30), &comm);
  EXPECT_TRUE(status.ok()) << status.message();
  return comm;
}

// In the child: 0 when the script ran to its end and every check held.
int RunRank(int rank, const std::string& directory, const Script& script) {
  alarm(kPatienceSeconds);  // a rank that hangs dies, and the test says so
  std::unique_ptr<collective::Communicator> comm = Connect(rank, directory);
  if (comm == nullptr) return 1;
  ProcessRank ranks(Poisoned(), std::move(comm));
  script(ranks);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

// Forked before this process has started any thread.
void RunProcesses(const Script& script) {
  std::string directory = std::filesystem::temp_directory_path() / "tributary-worker-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  std::fflush(nullptr);  // or every child would print it again
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const int code = RunRank(rank, directory, script);
      std::fflush(nullptr);
      _exit(code);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(children[static_cast<size_t>(rank)], &status, 0),
              children[static_cast<size_t>(rank)]);
    EXPECT_TRUE(WIFEXITED(status)) << "rank " << rank << ": signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << "rank " << rank << ": its output says why";
  }
  std::filesystem::remove_all(directory);
}

CacheSpec Spec(DType kv_dtype, int32_t interleave) {
  CacheSpec spec = SmallSpec();
  spec.kv_dtype = kv_dtype;
  spec.interleave = interleave;
  spec.num_pages = 96;
  spec.layers.resize(2);
  spec.layers[1].window.left = 19;
  spec.layers[1].sinks = {-1.0f, 0.0f, 1.0f, 2.0f};
  return spec;
}

TEST(Processes, BoundaryLengths) {
  RunProcesses([](Ranks& ranks) { RunBoundaryLengths(ranks, Spec(DType::kFp8E4M3, 16), {}); });
}

TEST(Processes, BoundaryLengthsTokenByToken) {
  RunProcesses([](Ranks& ranks) { RunBoundaryLengths(ranks, Spec(DType::kBf16, 1), {}); });
}

TEST(Processes, ChunkedPrefill) {
  RunProcesses([](Ranks& ranks) {
    RunChunkedPrefill(ranks, Spec(DType::kF16, 8), {}, {130, 7, 64});
  });
}

TEST(Processes, ForkAndTruncate) {
  RunProcesses([](Ranks& ranks) { RunForkAndTruncate(ranks, Spec(DType::kFp8E5M2, 4), {}); });
}

TEST(Processes, Drafts) {
  RunProcesses([](Ranks& ranks) {
    CacheSpec spec = Spec(DType::kFp8E4M3, 8);
    spec.layers[0].kv_dtype = DType::kBf16;
    spec.layers[1].window.right = 6;
    RunDrafts(ranks, spec, {});
  });
}

TEST(Processes, MixedBatches) {
  RunProcesses([](Ranks& ranks) { RunMixedBatches(ranks, Spec(DType::kFp8E4M3, 2), {}); });
}

}  // namespace
}  // namespace tributary::worker::testing
