// Steps through sessions whose mailbox lies on the GPU: what they compute, and how they end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
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
const bool kEnvironmentIsSet = (SetCudaEnvironment(), true);

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

TEST(GpuSessionTest, ForksThatReadTheirPagesTogether) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  RunSharedForks(ranks, ForksSpec(DType::kFp8E4M3), GpuTolerance(), /*tokens=*/3 * 1024 + 7,
                 /*forks=*/16);
}

// A thread looks at how far the session is all the time, also while a step is captured as a graph.
TEST(GpuSessionTest, StepsOfManyShapesAreCapturedWhileTheyAreWatched) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  TestHost host(ranks, LifecycleSpec(16), GpuTolerance());
  host.set_row_stride(8);
  host.Open(1);
  for (int32_t rows = 1; rows <= 16; ++rows) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      host.Step(StepKind::kDecode, {{1, rows, rows}});
      host.Truncate(1, 0);
    }
  }
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

// Both sides wait by stream memory operations.
TEST(GpuSessionTest, StreamsThatWait) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  {
    SessionRanks ranks({}, DType::kF32, Waiting::kStreamMemoryOps);
    RunDecodeVerifyPrefill(ranks, LifecycleSpec(16), GpuTolerance(), /*many=*/64);
  }
  SessionRanks ranks({}, DType::kF32, Waiting::kStreamMemoryOps);
  RunMixedBatches(ranks, LifecycleSpec(16), GpuTolerance());
}

TEST(GpuSessionTest, DraftsOfStreamsThatWait) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks({}, DType::kF32, Waiting::kStreamMemoryOps);
  RunDrafts(ranks, EveryLayerTypeSpec(), GpuTolerance());
}

// Several ranks, on a GPU each as far as there are so many. They read the one mailbox and exchange
// in a group of the session's own.
class GpuSessionRanks : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { TRIBUTARY_SKIP_WITHOUT_GPU(); }
};

TEST_P(GpuSessionRanks, DecodeVerifyPrefill) {
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, GetParam());
  RunDecodeVerifyPrefill(ranks, LifecycleSpec(16), GpuTolerance(), /*many=*/64);
}

TEST_P(GpuSessionRanks, MixedBatchesAndRepeats) {
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, GetParam());
  RunMixedBatches(ranks, LifecycleSpec(16), GpuTolerance());
}

TEST_P(GpuSessionRanks, BoundaryLengths) {
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, GetParam());
  RunBoundaryLengths(ranks, BoundarySpec(16, 16, DType::kFp8E4M3), GpuTolerance());
}

TEST_P(GpuSessionRanks, Drafts) {
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, GetParam());
  RunDrafts(ranks, EveryLayerTypeSpec(), GpuTolerance());
}

TEST_P(GpuSessionRanks, ChunkedPrefill) {
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, GetParam());
  RunChunkedPrefill(ranks, MaskSpec(31, true, 2.0f), GpuTolerance(), {70, 9, 33, 1, 80});
}

TEST_P(GpuSessionRanks, LayersThatDifferWhereTheStreamWaits) {
  SessionRanks ranks({}, DType::kF32, Waiting::kStreamMemoryOps, GetParam());
  RunDecodeVerifyPrefill(ranks, LayersDifferSpec(), GpuTolerance(), /*many=*/70);
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuSessionRanks, ::testing::Values(2, 3));

// Hosts whose heads are split over endpoints, which share the mailbox.
struct EndpointCase {
  int32_t endpoints;
  int ranks;
  Waiting waiting;
};

class GpuSessionEndpoints : public ::testing::TestWithParam<EndpointCase> {
 protected:
  void SetUp() override {
    TRIBUTARY_SKIP_WITHOUT_GPU();
    const EndpointCase& c = GetParam();
    ranks_.emplace(CudaBackendOptions{}, DType::kF32, c.waiting, c.ranks, c.endpoints);
  }
  std::optional<SessionRanks> ranks_;  // a GPU is needed to make one
};

TEST_P(GpuSessionEndpoints, DecodeVerifyPrefill) {
  RunDecodeVerifyPrefill(*ranks_, LifecycleSpec(16), GpuTolerance(), /*many=*/64);
}

TEST_P(GpuSessionEndpoints, MixedBatchesAndRepeats) {
  RunMixedBatches(*ranks_, LifecycleSpec(16), GpuTolerance());
}

TEST_P(GpuSessionEndpoints, Drafts) { RunDrafts(*ranks_, EveryLayerTypeSpec(), GpuTolerance()); }

INSTANTIATE_TEST_SUITE_P(Cases, GpuSessionEndpoints,
                         ::testing::Values(EndpointCase{2, 1, Waiting::kSpinningWarp},
                                           EndpointCase{4, 1, Waiting::kSpinningWarp},
                                           EndpointCase{2, 1, Waiting::kStreamMemoryOps},
                                           EndpointCase{2, 2, Waiting::kSpinningWarp}),
                         [](const auto& param) {
                           const EndpointCase& c = param.param;
                           const bool spins = c.waiting == Waiting::kSpinningWarp;
                           return std::to_string(c.endpoints) + "EndpointsOver" +
                                  std::to_string(c.ranks) + (spins ? "" : "StreamsWait");
                         });

// What all of them wait for in vain is named.
TEST(GpuSessionTest, ASilentEndpointEndsTheSession) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks({}, DType::kF32, Waiting::kSpinningWarp, 1, /*endpoints=*/2);
  const CacheSpec spec = LifecycleSpec(16);
  ASSERT_TRUE(ranks.Send(CreateCacheCommand{spec}).status.ok());
  ASSERT_TRUE(ranks.Send(SetTablesCommand{{{7, 0, {0, 1, 2, 3}}}}).status.ok());
  DeviceMailbox mailbox;
  const OpenSessionCommand command =
      ranks.Open(spec, 8, DType::kBf16, DType::kBf16, milliseconds(300), &mailbox);
  HostSession first(command, mailbox, Waiting::kSpinningWarp, 0);
  HostSession second(command, mailbox, Waiting::kSpinningWarp, 1);
  ASSERT_TRUE(
      ranks
          .Send(SessionStepCommand{
              .session = command.session,
              .kind = StepKind::kDecode,
              .layers = {{1, 0}, {1, 1}},
              .entries = {{.sequence = 7, .first_position = 0, .query_rows = 1, .new_tokens = 1}}})
          .status.ok());
  const LayerGeometry g = GeometryOf(spec, spec.layers[0]);
  const std::vector<std::byte> zeros(static_cast<size_t>(g.q_heads * g.kv.key_dim) * 2);
  const auto view = [&zeros](int32_t heads, int32_t dim) {
    return TensorView{
        .data = zeros.data(), .dtype = DType::kBf16, .bytes = static_cast<size_t>(heads * dim) * 2};
  };
  const TensorView kv = view(g.kv.kv_heads, g.kv.key_dim);
  first.Launch({g, view(g.q_heads, g.kv.key_dim), kv, kv, 1, 1});
  const SessionNews news = ranks.log().AwaitEnd(command.session, 2);
  EXPECT_EQ(news.status.code(), absl::StatusCode::kDeadlineExceeded) << news.status;
  EXPECT_THAT(news.status.message(), ::testing::HasSubstr("endpoint 1"));
  for (HostSession* host : {&first, &second}) {
    if (host == &second) host->Launch({g, view(g.q_heads, g.kv.key_dim), kv, kv, 1, 1});
    const HostSession::Results results = host->Finish();
    EXPECT_EQ(results.failure, 4u);
    for (const float x : results.o) EXPECT_TRUE(std::isnan(x));
  }
}

// A host that says that it begins, and does not go on, is not waited for as long as one that is
// silent: kernels that wait for it keep others from the GPU.
TEST(GpuSessionTest, AHandOverThatBeginsAndDoesNotEndEndsTheSession) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const StepKind kind : {StepKind::kDecode, StepKind::kDflash}) {
    SessionRanks ranks;
    const CacheSpec spec = LifecycleSpec(16);
    ASSERT_TRUE(ranks.Send(CreateCacheCommand{spec}).status.ok());
    ASSERT_TRUE(ranks.Send(SetTablesCommand{{{7, 0, {0, 1, 2, 3}}}}).status.ok());
    DeviceMailbox mailbox;
    const OpenSessionCommand command =
        ranks.Open(spec, 8, DType::kBf16, DType::kBf16, std::chrono::minutes(5), &mailbox);
    ASSERT_NE(command.layout.begun, 0u);
    HostSession host(command, mailbox);
    ASSERT_TRUE(ranks
                    .Send(SessionStepCommand{.session = command.session,
                                             .kind = kind,
                                             .layers = {{1, 0}, {1, 1}},
                                             .entries = {{.sequence = 7,
                                                          .first_position = 0,
                                                          .query_rows = 1,
                                                          .new_tokens = 1}}})
                    .status.ok());
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_EQ(cudaMemcpyAsync(host.view().mailbox + command.layout.begun, &mailbox::kLayerParts,
                              sizeof(mailbox::kLayerParts), cudaMemcpyDefault, host.stream()),
              cudaSuccess);
    const SessionNews news = ranks.log().AwaitEnd(command.session, 2);
    EXPECT_EQ(news.status.code(), absl::StatusCode::kDeadlineExceeded) << news.status;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  }
}

// A host's graph with layers of a session in it is launched again and again.
TEST(GpuSessionTest, GraphsOfHostsGoOnForEver) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const Waiting waiting : {Waiting::kSpinningWarp, Waiting::kStreamMemoryOps}) {
    SessionRanks ranks({}, DType::kF32, waiting);
    const CacheSpec spec = LifecycleSpec(16);
    ASSERT_TRUE(ranks.Send(CreateCacheCommand{spec}).status.ok());
    ASSERT_TRUE(ranks.Send(SetTablesCommand{{{7, 0, {0, 1, 2, 3}}}}).status.ok());
    DeviceMailbox mailbox;
    const OpenSessionCommand command =
        ranks.Open(spec, 8, DType::kBf16, DType::kBf16, std::chrono::seconds(10), &mailbox);
    HostSession host(command, mailbox, waiting);
    const LayerGeometry g = GeometryOf(spec, spec.layers[0]);
    cuda::DeviceBuffer zeros;
    ASSERT_EQ(zeros.Allocate(64 << 10), cudaSuccess);
    ASSERT_EQ(cudaMemset(zeros.data(), 0, 64 << 10), cudaSuccess);
    const auto tensor = [&](int32_t heads, int32_t dim) {
      return client::StridedTensor{.data = zeros.data(),
                                   .rows = 1,
                                   .heads = heads,
                                   .head_bytes = dim * 2,
                                   .row_stride = int64_t{heads} * dim * 2,
                                   .head_stride = int64_t{dim} * 2};
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(host.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int layer = 0; layer < 2; ++layer) {
      const client::StridedTensor kv = tensor(g.kv.kv_heads, g.kv.key_dim);
      ASSERT_EQ(client::LaunchHandOver(host.view(), tensor(g.q_heads, g.kv.key_dim), kv, kv, {},
                                       host.stream()),
                cudaSuccess);
      ASSERT_EQ(client::LaunchTakeBack(host.view(), {}, {}, host.stream()), cudaSuccess);
    }
    ASSERT_EQ(cudaStreamEndCapture(host.stream(), &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    for (uint32_t step = 0; step < 40; ++step) {
      ASSERT_TRUE(ranks
                      .Send(SessionStepCommand{.session = command.session,
                                               .kind = StepKind::kDecode,
                                               .first_count = 2 * step,
                                               .layers = {{1, 0}, {1, 1}},
                                               .entries = {{.sequence = 7,
                                                            .first_position = step,
                                                            .query_rows = 1,
                                                            .new_tokens = 1}},
                                               .waiting = waiting})
                      .status.ok());
      ASSERT_EQ(cudaGraphLaunch(replay, host.stream()), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(host.stream()), cudaSuccess);
      const SessionNews news = ranks.log().AwaitEnd(command.session, 2 * step + 2);
      ASSERT_TRUE(news.status.ok()) << news.status;
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
}

TEST(GpuSessionTest, RoundTripsAreTimedBothWays) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  DeviceMailbox mailbox;
  const CacheSpec spec = LifecycleSpec(16);
  ASSERT_TRUE(ranks.Send(CreateCacheCommand{spec}).status.ok());
  const OpenSessionCommand command =
      ranks.Open(spec, 8, DType::kBf16, DType::kBf16, std::chrono::seconds(10), &mailbox,
                 /*measures=*/true);
  HostSession host(command, mailbox);
  client::RoundTrips times;
  ASSERT_EQ(client::TimeRoundTrips(host.view(), kProbeRounds,
                                   std::chrono::steady_clock::now() + std::chrono::seconds(5),
                                   host.stream(), &times),
            cudaSuccess);
  EXPECT_GT(times.memory_ops, 0);
  EXPECT_GT(times.spinning, 0);
  RecordProperty("memory_ops_us", std::to_string(times.memory_ops * 1e6));
  RecordProperty("spinning_us", std::to_string(times.spinning * 1e6));
  std::printf("round trips: %.1f us by stream memory operations, %.1f us by spinning warps\n",
              times.memory_ops * 1e6, times.spinning * 1e6);
}

// The memory of one is freed, which may wait for all launches, while the next one is opened, whose
// launches wait for the host.
TEST(GpuSessionTest, OneIsOpenedAsAnotherEnds) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  SessionRanks ranks;
  const CacheSpec spec = LifecycleSpec(16);
  ASSERT_TRUE(ranks.Send(CreateCacheCommand{spec}).status.ok());
  for (int i = 0; i < 20; ++i) {
    DeviceMailbox mailbox;
    const auto begin = std::chrono::steady_clock::now();
    const OpenSessionCommand command =
        ranks.Open(spec, 8, DType::kBf16, DType::kBf16, std::chrono::seconds(10), &mailbox,
                   /*measures=*/true);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
    HostSession host(command, mailbox);
    client::RoundTrips times;
    ASSERT_EQ(client::TimeRoundTrips(host.view(), kProbeRounds,
                                     std::chrono::steady_clock::now() + std::chrono::seconds(5),
                                     host.stream(), &times),
              cudaSuccess);
    ASSERT_TRUE(ranks.Send(CloseSessionCommand{command.session, 10}).status.ok());
  }
}

// ---- how sessions end ---------------------------------------------------------------------------

// A cache of two layers, one sequence of no tokens with all its pages, and a session.
struct EndCase {
  Waiting waiting;
  int ranks;
};

class GpuSessionEnd : public ::testing::TestWithParam<EndCase> {
 protected:
  void SetUp() override {
    TRIBUTARY_SKIP_WITHOUT_GPU();
    ranks_.emplace(CudaBackendOptions{}, DType::kF32, GetParam().waiting, GetParam().ranks);
  }

  void Begin(std::chrono::nanoseconds wait_timeout) {
    spec_ = LifecycleSpec(16);
    ASSERT_TRUE(ranks_->Send(CreateCacheCommand{spec_}).status.ok());
    ASSERT_TRUE(ranks_->Send(SetTablesCommand{{{kSequence, 0, {0, 1, 2, 3}}}}).status.ok());
    command_ = ranks_->Open(spec_, 8, DType::kBf16, DType::kBf16, wait_timeout, &mailbox_);
    host_.emplace(command_, mailbox_, GetParam().waiting);
  }

  absl::Status Submit() {
    SessionStepCommand step{.session = command_.session,
                            .kind = StepKind::kDecode,
                            .first_count = count_,
                            .layers = {{1, 0}, {1, 1}},
                            .entries = {{.sequence = kSequence,
                                         .first_position = length_,
                                         .query_rows = 1,
                                         .new_tokens = 1}},
                            .waiting = GetParam().waiting};
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
    return host_->Layer({g, view(q), view(k), view(v), 1, 1});
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

TEST_P(GpuSessionEnd, StepsSubmittedAheadAreServedInOrder) {
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
TEST_P(GpuSessionEnd, ASilentHostEndsByItsBoundAndDelaysNobody) {
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

TEST_P(GpuSessionEnd, AHostThatWaitsLearnsOfTheEnd) {
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

TEST_P(GpuSessionEnd, ClosingInTheMidstOfAStepEndsIt) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ASSERT_TRUE(Submit().ok());
  ASSERT_EQ(HandOver().failure, 0u);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(ranks_->Send(CloseSessionCommand{command_.session, 10}).status.ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

TEST_P(GpuSessionEnd, ADroppedCacheEndsTheSessionsThatUseIt) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ASSERT_EQ(HandOver().failure, 0u);
  EXPECT_TRUE(ranks_->Send(DropCacheCommand{}).status.ok());
  EXPECT_EQ(Submit().code(), absl::StatusCode::kNotFound);
}

TEST_P(GpuSessionEnd, ANewEpochEndsAllSessions) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  ranks_->ranks().Reform();
  EXPECT_EQ(Submit().code(), absl::StatusCode::kNotFound);
}

TEST_P(GpuSessionEnd, AnotherCacheComesAndGoesWhileTheHostIsSilent) {
  Begin(std::chrono::seconds(10));
  ASSERT_TRUE(Submit().ok());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(ranks_->Send(CreateCacheCommand{spec_}, 2).status.ok());
  EXPECT_TRUE(ranks_->Send(DropCacheCommand{}, 2).status.ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
  EXPECT_EQ(HandOver().failure, 0u);
  EXPECT_EQ(HandOver().failure, 0u);
}

TEST_P(GpuSessionEnd, AGpuServesSoManySessionsAtATime) {
  Begin(std::chrono::seconds(10));
  OpenSessionCommand more = command_;
  for (int i = 1; i < kMostDeviceSessions; ++i) {
    ++more.session;
    ASSERT_TRUE(ranks_->Send(more).status.ok());
  }
  const SessionId last = more.session++;
  EXPECT_EQ(ranks_->Send(more).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(ranks_->Send(CloseSessionCommand{last, 10}).status.ok());
  EXPECT_TRUE(ranks_->Send(more).status.ok());
}

TEST_P(GpuSessionEnd, BadStepsAreRefusedAndTheSessionGoesOn) {
  Begin(std::chrono::seconds(10));
  length_ = 100'000;
  EXPECT_EQ(Submit().code(), absl::StatusCode::kOutOfRange);
  length_ = 0;
  ASSERT_TRUE(Submit().ok());
  EXPECT_EQ(HandOver().failure, 0u);
  EXPECT_EQ(HandOver().failure, 0u);
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuSessionEnd,
                         ::testing::Values(EndCase{Waiting::kSpinningWarp, 1},
                                           EndCase{Waiting::kStreamMemoryOps, 1},
                                           EndCase{Waiting::kSpinningWarp, 2}),
                         [](const auto& param) {
                           const bool spins = param.param.waiting == Waiting::kSpinningWarp;
                           return std::string(spins ? "SpinningWarp" : "StreamMemoryOps") +
                                  std::to_string(param.param.ranks);
                         });

}  // namespace
}  // namespace tributary::worker::testing
