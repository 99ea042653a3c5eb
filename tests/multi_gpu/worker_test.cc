// Ranks with a GPU each that exchange in device memory, against the dense float64 model: the
// worker's scenarios over every strategy, graphs, calls larger than a group is made for, and a
// thousand steps during which groups break and form again.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/worker/cuda/gpu_ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"

namespace tributary::worker::testing {
namespace {

using collective::Strategy;
using ::testing::HasSubstr;

// Ends the test; in SetUp, every test of the fixture.
#define TRIBUTARY_SKIP_BELOW_GPUS(n) \
  if (const absl::Status enough = CheckGpus(0, n); !enough.ok()) GTEST_SKIP() << enough.message()

// Ranks that exchange on the device where they can, and how they say they do.
class DeviceRanks {
 public:
  explicit DeviceRanks(int size, CudaBackendOptions options = {}, ExecutorOptions executor = {}) {
    options.exchange = ExchangePlace::kAuto;
    options.on_exchange = [this](const std::string& how) {
      const std::lock_guard lock(mutex_);
      how_ = how;
    };
    executor.page_fill = PageFill::kPoison;
    ranks_ = std::make_unique<ThreadRanks>(GpuBackends(size, options), executor);
  }

  ThreadRanks& ranks() { return *ranks_; }
  std::string how() const {
    const std::lock_guard lock(mutex_);
    return how_;
  }
  bool on_device() const { return how().find("device memory") != std::string::npos; }

 private:
  mutable std::mutex mutex_;
  std::string how_;
  std::unique_ptr<ThreadRanks> ranks_;
};

// NCCL is not on every machine; peer access between the GPUs of the machines that this is for is.
#define TRIBUTARY_SKIP_WITHOUT_NCCL(ranks)         \
  if (!(ranks).on_device()) {                      \
    ASSERT_THAT((ranks).how(), HasSubstr("NCCL")); \
    GTEST_SKIP() << (ranks).how();                 \
  }

// ---- the grid, over every strategy ------------------------------------------------------------

class DeviceGrid : public ::testing::TestWithParam<std::tuple<int, Strategy>> {
 protected:
  void SetUp() override { TRIBUTARY_SKIP_BELOW_GPUS(size()); }
  int size() const { return std::get<0>(GetParam()); }
  CudaBackendOptions Options() const { return {.strategy = std::get<1>(GetParam())}; }
  CacheSpec Spec() const {
    CacheSpec spec = SmallSpec();
    SetHeads(&spec, 2, 3, 64);  // 6 heads over 4 ranks: slices of 2, 2, 1 and 1
    spec.interleave = 8;
    spec.num_pages = 96;
    spec.layers.resize(2);
    spec.layers[1].window.left = 20;
    spec.layers[1].sinks = SinksFor(spec.q_heads);
    return spec;
  }
};

TEST_P(DeviceGrid, ThatItIsTheStrategyAskedFor) {
  DeviceRanks ranks(size(), Options());
  const Strategy strategy = Options().strategy;
  if (strategy == Strategy::kAuto || strategy == Strategy::kDirect) {
    EXPECT_THAT(ranks.how(), HasSubstr("device memory, by direct"));
    return;
  }
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  EXPECT_THAT(ranks.how(), HasSubstr("device memory, by NCCL"));
}

TEST_P(DeviceGrid, BoundaryLengths) {
  for (const DType kv_dtype : {DType::kFp8E4M3, DType::kBf16}) {
    DeviceRanks ranks(size(), Options());
    TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
    CacheSpec spec = Spec();
    spec.kv_dtype = kv_dtype;
    RunBoundaryLengths(ranks.ranks(), spec, GpuTolerance());
  }
}

TEST_P(DeviceGrid, ChunkedPrefill) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunChunkedPrefill(ranks.ranks(), Spec(), GpuTolerance(), {70, 9, 33, 1, 80});
}

TEST_P(DeviceGrid, ForkAndTruncate) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunForkAndTruncate(ranks.ranks(), Spec(), GpuTolerance());
}

TEST_P(DeviceGrid, ForksThatReadTheirPagesTogether) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunSharedForks(ranks.ranks(), ForksSpec(DType::kFp8E4M3), GpuTolerance(),
                 /*tokens=*/3 * 1024 * size() + 7, /*forks=*/16);
}

TEST_P(DeviceGrid, MixedBatches) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunMixedBatches(ranks.ranks(), Spec(), GpuTolerance());
}

TEST_P(DeviceGrid, PartialsThatTravelAsBf16) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  TestHost::Options options = GpuTolerance();
  options.bf16_partials = true;
  RunMixedBatches(ranks.ranks(), Spec(), options);
}

TEST_P(DeviceGrid, PoisonedSlots) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunPoisonedSlots(ranks.ranks(), Spec(), GpuTolerance());
}

// A rank's slice of a block goes into its partial before the one exchange.
TEST_P(DeviceGrid, Drafts) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  CacheSpec spec = Spec();
  spec.layers[0].kv_dtype = DType::kFp8E4M3;
  spec.layers[1].window.right = 6;
  RunDrafts(ranks.ranks(), spec, GpuTolerance());
}

// Every pass has an exchange of its own.
TEST_P(DeviceGrid, StepsInPasses) {
  DeviceRanks ranks(size(), Options(), {.rows_per_pass = 24});
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  RunStepsInPasses(ranks.ranks(), Spec(), GpuTolerance());
}

// More than a group is made for, and fewer heads than ranks.
TEST_P(DeviceGrid, LargeCallsAreMadeInPieces) {
  DeviceRanks ranks(size(), Options());
  TRIBUTARY_SKIP_WITHOUT_NCCL(ranks);
  for (const int kv_heads : {1, 4}) {
    CacheSpec spec = SmallSpec();
    SetHeads(&spec, kv_heads, kv_heads == 1 ? 1 : 16, 128);
    spec.num_pages = 128;
    TestHost host(ranks.ranks(), spec, GpuTolerance());
    host.set_row_stride(37);
    host.Open(1);
    host.Open(2);
    host.Step(StepKind::kPrefill, {{1, 900, 900}});
    host.Step(StepKind::kPrefill, {{1, 700, 700}, {2, 100, 100}});
    host.Step(StepKind::kDecode, {{1, 64, 64}, {2, 1, 1}});
    host.Close(1);
    host.Close(2);
    Command drop;
    drop.epoch = ranks.ranks().epoch();
    drop.cache = 7;  // TestHost's
    drop.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    drop.body = DropCacheCommand{};
    for (const auto& [rank, reply] : ranks.ranks().Execute(drop)) {
      EXPECT_TRUE(reply.status.ok()) << reply.status;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, DeviceGrid,
                         ::testing::Combine(::testing::Values(2, 4),
                                            ::testing::Values(Strategy::kAuto, Strategy::kDirect,
                                                              Strategy::kAllGather, Strategy::kAgRs,
                                                              Strategy::kA2a)),
                         [](const auto& grid) {
                           return std::to_string(std::get<0>(grid.param)) + "Gpus_" +
                                  collective::Name(std::get<1>(grid.param));
                         });

// ---- graphs, places and numbers of ranks change nothing ----------------------------------------

CacheSpec DecodeSpec() { return Fp8Spec(2, 4, 40); }

// Rows of decode steps one after the other; every step looks like an earlier one soon, on one rank
// before another.
std::vector<float> DecodeMany(Ranks& ranks) {
  TestHost host(ranks, DecodeSpec(), GpuTolerance());
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kAppend, {{1, 0, 300}, {2, 0, 33}});
  std::vector<float> all;
  for (int step = 0; step < 40; ++step) {
    host.Step(StepKind::kDecode, {{1, 1, 1}, {2, step % 3 + 1, step % 3 + 1}});
    all.insert(all.end(), host.last_o().begin(), host.last_o().end());
  }
  return all;
}

class DeviceGraphs : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { TRIBUTARY_SKIP_BELOW_GPUS(GetParam()); }
};

TEST_P(DeviceGraphs, ChangeNothing) {
  DeviceRanks with(GetParam(), {.graphs = true});
  DeviceRanks without(GetParam(), {.graphs = false});
  ASSERT_TRUE(with.on_device()) << with.how();
  EXPECT_EQ(DecodeMany(with.ranks()), DecodeMany(without.ranks()));
}

// Two ranks replay what the others launch one by one: the exchange is the same kernel.
TEST_P(DeviceGraphs, NotEveryRankNeedsThem) {
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < GetParam(); ++rank) {
    auto backend =
        CreateCudaBackend({.gpu = rank, .exchange = ExchangePlace::kAuto, .graphs = rank % 2 == 0});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backends.push_back(*std::move(backend));
  }
  ThreadRanks mixed(std::move(backends), Poisoned());
  DeviceRanks without(GetParam(), {.graphs = false});
  EXPECT_EQ(DecodeMany(mixed), DecodeMany(without.ranks()));
}

TEST_P(DeviceGraphs, AreForgottenWithTheGroup) {
  DeviceRanks ranks(GetParam());
  ASSERT_TRUE(ranks.on_device()) << ranks.how();
  for (int epoch = 0; epoch < 3; ++epoch) {
    DecodeMany(ranks.ranks());
    ranks.ranks().Reform();
  }
}

TEST_P(DeviceGraphs, DeviceAndHostGiveOneResult) {
  DeviceRanks device(GetParam());
  ASSERT_TRUE(device.on_device()) << device.how();
  GpuRanks host(GetParam());
  const std::vector<float> expected = DecodeMany(host);
  EXPECT_TRUE(test::AllClose(DecodeMany(device.ranks()), expected, {1e-5, 1e-5},
                             {static_cast<int64_t>(expected.size())}));
}

INSTANTIATE_TEST_SUITE_P(Gpus, DeviceGraphs, ::testing::Values(2, 4));

// ---- groups that break --------------------------------------------------------------------------

// Bytes in use on all GPUs together.
size_t MemoryInUse(int gpus) {
  size_t used = 0;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cudaSetDevice(gpu), cudaSuccess);
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    used += total - free;
  }
  return used;
}

class BrokenGroups : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { TRIBUTARY_SKIP_BELOW_GPUS(GetParam()); }
  // A step that every rank but `absent` enters.
  void StepWithout(ThreadRanks& ranks, const Command& step, int absent) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank == absent) continue;
      threads.emplace_back([&, rank] {
        const auto begin = std::chrono::steady_clock::now();
        const Reply reply = ranks.executor(rank).Execute(step);
        // Rank 0 alone receives; the others may be through before anybody is missed.
        if (rank == 0) {
          EXPECT_TRUE(absl::IsDeadlineExceeded(reply.status) || absl::IsAborted(reply.status))
              << reply.status;
        }
        EXPECT_TRUE(reply.status.ok() || reply.o.empty());
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  Command DecodeOne(ThreadRanks& ranks, const CacheSpec& spec, std::chrono::milliseconds patience) {
    Command command;
    command.epoch = ranks.epoch();
    command.cache = 7;  // TestHost's
    command.deadline = std::chrono::steady_clock::now() + patience;
    StepCommand step;
    step.entries = {{.sequence = 1, .first_position = 0, .query_rows = 1}};
    step.q = {ones_.data(), DType::kBf16, static_cast<size_t>(spec.q_heads * spec.head_dim) * 2};
    step.k = step.v = {ones_.data(), DType::kBf16, 0};
    command.body = step;
    return command;
  }

  const std::vector<std::byte> ones_ = std::vector<std::byte>(1 << 16, std::byte{0x3f});
};

TEST_P(BrokenGroups, ARankThatStaysAwayEndsTheStepByItsDeadline) {
  DeviceRanks ranks(GetParam());
  ASSERT_TRUE(ranks.on_device()) << ranks.how();
  TestHost host(ranks.ranks(), DecodeSpec(), GpuTolerance());
  host.Open(1);
  host.Step(StepKind::kPrefill, {{1, 100, 100}});
  host.Step(StepKind::kDecode, {{1, 1, 1}});
  for (const int absent : {1, GetParam() - 1}) {
    StepWithout(ranks.ranks(),
                DecodeOne(ranks.ranks(), DecodeSpec(), std::chrono::milliseconds(500)), absent);
    ranks.ranks().Reform();
    ASSERT_TRUE(ranks.on_device()) << ranks.how();
    host.Step(StepKind::kDecode, {{1, 1, 1}});  // over what all of them kept
  }
}

TEST_P(BrokenGroups, AbortFromAnotherThreadEndsAWait) {
  DeviceRanks ranks(GetParam());
  ASSERT_TRUE(ranks.on_device()) << ranks.how();
  TestHost host(ranks.ranks(), DecodeSpec(), GpuTolerance());
  host.Open(1);
  host.Step(StepKind::kPrefill, {{1, 100, 100}});
  host.Step(StepKind::kDecode, {{1, 1, 1}});
  // Rank 0 waits for the others, which never come.
  const Command step = DecodeOne(ranks.ranks(), DecodeSpec(), std::chrono::seconds(60));
  const auto begin = std::chrono::steady_clock::now();
  Reply reply;
  std::thread waits([&] { reply = ranks.ranks().executor(0).Execute(step); });
  ranks.ranks().executor(0).communicator()->Abort("no longer wanted");
  waits.join();
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kAborted) << reply.status;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  ranks.ranks().Reform();
  host.Step(StepKind::kDecode, {{1, 1, 1}});
}

// A rank is lost, or merely late, again and again. What the others hold is right all the while, and
// memory is where it was in the end: buffers of epochs gone by do not pile up.
TEST_P(BrokenGroups, AThousandStepsWithRandomMembership) {
  constexpr int kSteps = 1000;
  constexpr int kWarm = 200;
  DeviceRanks ranks(GetParam());
  ASSERT_TRUE(ranks.on_device()) << ranks.how();
  TestHost host(ranks.ranks(), DecodeSpec(), GpuTolerance());
  host.set_row_stride(5);
  std::mt19937 random(7);
  host.Open(1);
  host.Step(StepKind::kAppend, {{1, 0, 100}});
  size_t before = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kWarm) {
      ranks.ranks().Reform();
      before = MemoryInUse(GetParam());
    }
    if (random() % 20 == 0) {
      const int absent = static_cast<int>(random() % static_cast<unsigned>(GetParam()));
      StepWithout(ranks.ranks(),
                  DecodeOne(ranks.ranks(), DecodeSpec(), std::chrono::milliseconds(50)), absent);
      ranks.ranks().Reform();
      ASSERT_TRUE(ranks.on_device()) << ranks.how();
    }
    if (host.length(1) > 400) host.Truncate(1, 100);
    const auto rows = static_cast<int32_t>(1 + random() % 4);
    host.Step(StepKind::kDecode, {{1, rows, rows}});
    if (HasFailure()) return;
  }
  ranks.ranks().Reform();
  const size_t after = MemoryInUse(GetParam());
  // A few graphs and the driver's own come and go; one epoch's buffers are 17 MB a rank.
  EXPECT_LT(after, before + (size_t{16} << 20) * static_cast<size_t>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Gpus, BrokenGroups, ::testing::Values(2, 4));

// Ranks that share a GPU do not exchange on it, and say why.
TEST(DeviceExchange, RanksThatShareAGpuMeetOnTheHost) {
  TRIBUTARY_SKIP_BELOW_GPUS(1);
  std::string how;
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < 2; ++rank) {
    CudaBackendOptions options{.gpu = 0, .exchange = ExchangePlace::kAuto};
    if (rank == 0) options.on_exchange = [&how](const std::string& said) { how = said; };
    auto backend = CreateCudaBackend(options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backends.push_back(*std::move(backend));
  }
  ThreadRanks ranks(std::move(backends), Poisoned());
  EXPECT_EQ(how, "partials meet in host memory: ranks 0 and 1 share a GPU");
  RunMixedBatches(ranks, SmallSpec(), GpuTolerance());
}

}  // namespace
}  // namespace tributary::worker::testing
