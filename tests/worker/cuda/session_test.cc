// Steps through sessions whose mailbox lies on the GPU: what they compute, and how they end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/worker/cuda/session_ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"

namespace tributary::worker::testing {
namespace {

using std::chrono::milliseconds;

// As in the programs: a kernel that is loaded at its first launch would wait for the gates of
// sessions.
const bool kKernelsAreLoaded = (LoadKernelsAtStart(), true);

// ---- the correctness grid, through sessions -----------------------------------------------------

class SessionGeometry : public ::testing::TestWithParam<std::tuple<DType, int, int>> {};

TEST_P(SessionGeometry, DecodeVerifyPrefill) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [kv_dtype, head_dim, group] = GetParam();
  SessionRanks ranks;
  RunDecodeVerifyPrefill(ranks, GeometrySpec(kv_dtype, head_dim, group),
                         GpuTolerance(InputsInTurn(head_dim, group)), /*many=*/64);
}

INSTANTIATE_TEST_SUITE_P(Grid, SessionGeometry,
                         ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kBf16),
                                            ::testing::Values(64, 80, 128, 256),
                                            ::testing::Values(1, 8)));

TEST(GpuSessionTest, BoundaryLengths) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunBoundaryLengths(ranks, BoundarySpec(16, 16, DType::kFp8E4M3), GpuTolerance());
}

TEST(GpuSessionTest, ForkAndTruncate) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunForkAndTruncate(ranks, LifecycleSpec(16), GpuTolerance());
}

TEST(GpuSessionTest, MixedBatchesAndRepeats) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunMixedBatches(ranks, LifecycleSpec(16), GpuTolerance());
}

TEST(GpuSessionTest, Drafts) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunDrafts(ranks, EveryLayerTypeSpec(), GpuTolerance());
}

TEST(GpuSessionTest, ChunkedPrefill) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunChunkedPrefill(ranks, MaskSpec(31, true, 2.0f), GpuTolerance(), {70, 9, 33, 1, 80});
}

TEST(GpuSessionTest, LayersThatDiffer) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunDecodeVerifyPrefill(ranks, LayersDifferSpec(), GpuTolerance(), /*many=*/70);
}

TEST(GpuSessionTest, WithoutGraphs) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks({.graphs = false});
  RunDecodeVerifyPrefill(ranks, LifecycleSpec(16), GpuTolerance(), /*many=*/64);
}

TEST(GpuSessionTest, Portable) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks({.portable = true});
  RunDecodeVerifyPrefill(ranks, LifecycleSpec(16), GpuTolerance(), /*many=*/64);
}

// ---- how sessions end ---------------------------------------------------------------------------

// A cache of two layers, one sequence of no tokens with all its pages, and a session.
class GpuSessionEnd : public ::testing::Test {
 protected:
  void SetUp() override {
    TRIBUTARY_SKIP_WITHOUT_GPU();
    ranks_.emplace();
  }

  void Begin(std::chrono::nanoseconds wait_timeout) {
    spec_ = LifecycleSpec(16);
    ASSERT_TRUE(ranks_->Send(CreateCacheCommand{spec_}).status.ok());
    ASSERT_TRUE(ranks_->Send(SetTablesCommand{{{kSequence, 0, {0, 1, 2, 3}}}}).status.ok());
    command_ = ranks_->Open(spec_, 8, DType::kBf16, DType::kBf16, wait_timeout, &mailbox_);
    host_.emplace(command_, mailbox_);
  }

  absl::Status Submit() {
    SessionStepCommand step{
        .session = command_.session,
        .kind = StepKind::kDecode,
        .first_count = count_,
        .layers = {{1, 0}, {1, 1}},
        .entries = {
            {.sequence = kSequence, .first_position = length_, .query_rows = 1, .new_tokens = 1}}};
    const absl::Status status = ranks_->Send(step).status;
    if (status.ok()) {
      count_ += 2;
      ++length_;
    }
    return status;
  }

  HostSession::Results HandOver() {
    const LayerGeometry g = GeometryOf(spec_, spec_.layers[0]);
    const auto zeros = [](int32_t heads, int32_t dim) {
      return std::vector<std::byte>(static_cast<size_t>(heads * dim) * 2);
    };
    const auto view = [](const std::vector<std::byte>& bytes) {
      return TensorView{.data = bytes.data(), .dtype = DType::kBf16, .bytes = bytes.size()};
    };
    const auto q = zeros(g.q_heads, g.kv.key_dim);
    const auto k = zeros(g.kv.kv_heads, g.kv.key_dim);
    const auto v = zeros(g.kv.kv_heads, g.kv.value_dim);
    return host_->Layer(g, view(q), view(k), view(v), 1, 1);
  }

  static constexpr SequenceId kSequence = 7;
  std::optional<SessionRanks> ranks_;  // a GPU is needed to make one
  CacheSpec spec_;
  OpenSessionCommand command_;
  DeviceMailbox mailbox_;
  std::optional<HostSession> host_;
  uint32_t count_ = 0;
  int64_t length_ = 0;
};

TEST_F(GpuSessionEnd, StepsSubmittedAheadAreServedInOrder) {
  Begin(std::chrono::seconds(10));
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(Submit().ok());
    ASSERT_TRUE(Submit().ok());
    for (int layer = 0; layer < 4; ++layer) {
      const HostSession::Results results = HandOver();
      ASSERT_EQ(results.failure, 0u);
      for (const float x : results.o) ASSERT_EQ(x, 0.0f);
    }
    ranks_->log().AwaitEnd(command_.session, count_);
  }
}

// Of the spinning launches of one session nobody else's step takes notice.
TEST_F(GpuSessionEnd, ASilentHostEndsByItsBoundAndDelaysNobody) {
  Begin(milliseconds(1500));
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  const auto begin = std::chrono::steady_clock::now();
  // Another tenant: its cache, its steps, memory that grows and goes.
  TestHost other(ranks_->ranks(), SmallSpec(), GpuTolerance());
  static_cast<void>(other);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1000));
  const SessionNews news = ranks_->log().AwaitEnd(command_.session, count_);
  EXPECT_EQ(news.status.code(), absl::StatusCode::kDeadlineExceeded) << news.status;
  // A host that comes back finds out, and gets nothing that looks right.
  const HostSession::Results late = HandOver();
  EXPECT_EQ(late.failure, 4u);
  for (const float x : late.o) EXPECT_TRUE(std::isnan(x));
}

TEST_F(GpuSessionEnd, AHostThatWaitsLearnsOfTheEnd) {
  Begin(std::chrono::seconds(10));
  // Nothing was submitted, so nothing will come of this layer.
  std::thread closes([&] {
    std::this_thread::sleep_for(milliseconds(300));
    ranks_->Send(CloseSessionCommand{command_.session, 10});
  });
  const auto begin = std::chrono::steady_clock::now();
  const HostSession::Results results = HandOver();
  EXPECT_EQ(results.failure, 10u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  for (const float x : results.o) EXPECT_TRUE(std::isnan(x));
  closes.join();
  EXPECT_EQ(Submit().code(), absl::StatusCode::kNotFound);
}

TEST_F(GpuSessionEnd, ClosingInTheMidstOfAStepEndsIt) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  ASSERT_EQ(HandOver().failure, 0u);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(ranks_->Send(CloseSessionCommand{command_.session, 10}).status.ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

TEST_F(GpuSessionEnd, ADroppedCacheEndsTheSessionsThatUseIt) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ASSERT_EQ(HandOver().failure, 0u);
  EXPECT_TRUE(ranks_->Send(DropCacheCommand{}).status.ok());
  EXPECT_EQ(Submit().code(), absl::StatusCode::kNotFound);
}

TEST_F(GpuSessionEnd, ANewEpochEndsAllSessions) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ranks_->ranks().Reform();
  EXPECT_EQ(Submit().code(), absl::StatusCode::kNotFound);
}

TEST_F(GpuSessionEnd, BadStepsAreRefusedAndTheSessionGoesOn) {
  Begin(std::chrono::seconds(10));
  length_ = 100'000;
  EXPECT_EQ(Submit().code(), absl::StatusCode::kOutOfRange);
  length_ = 0;
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(HandOver().failure, 0u);
  EXPECT_EQ(HandOver().failure, 0u);
}

}  // namespace
}  // namespace tributary::worker::testing
