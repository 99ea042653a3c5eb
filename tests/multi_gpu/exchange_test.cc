// Partials in GPU memory: every strategy and placement against a merge in float64, step after step,
// in CUDA graphs, with ranks that do not come.
#include <gmock/gmock.h>

#include <thread>

#include "collective/direct/direct.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "tests/multi_gpu/gpu_ranks.h"

namespace tributary::collective {
namespace {

using std::chrono::milliseconds;

constexpr int kPoison = 0xee;
constexpr Strategy kStrategies[] = {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a,
                                    Strategy::kDirect};
constexpr Placement kPlacements[] = {Placement::kGathered, Placement::kScattered};

// A call of one rank: its buffers, and what came of it.
class RankCall {
 public:
  RankCall(const ExchangeCase& c, const Partials& p, int rank, int ranks, cudaStream_t stream)
      : case_(c),
        stream_(stream),
        slice_(c.placement == Placement::kGathered ? HeadSlice{0, rank == 0 ? c.heads : 0}
                                                   : SliceOfRank(c.heads, ranks, rank)),
        encoded_(Encode(c.o, p.o[rank])),
        o_(encoded_.bytes.size()),
        lse_(p.lse[rank].size() * sizeof(float)),
        sinks_(p.sinks.size() * sizeof(float)),
        out_(Pairs() * c.value_dim * SizeOf(c.out) + kGuard),
        lse_out_(Pairs() * sizeof(float) + kGuard) {
    o_.Set(encoded_.bytes.data(), stream);
    lse_.Set(p.lse[rank].data(), stream);
    sinks_.Set(p.sinks.data(), stream);
    Poison();
  }

  void Poison() {
    out_.Fill(kPoison, stream_);
    lse_out_.Fill(kPoison, stream_);
  }

  DeviceExchangeParams Params() const {
    return {.o = o_.data(),
            .o_dtype = case_.o,
            .lse = static_cast<const float*>(lse_.data()),
            .rows = case_.rows,
            .heads = case_.heads,
            .value_dim = case_.value_dim,
            .sinks = case_.sinks ? static_cast<const float*>(sinks_.data()) : nullptr,
            .placement = case_.placement,
            .strategy = case_.strategy,
            .wire = case_.wire,
            .out = slice_.count > 0 ? out_.data() : nullptr,
            .out_dtype = case_.out,
            .lse_out = slice_.count > 0 ? static_cast<float*>(lse_out_.data()) : nullptr};
  }

  // Exchanges three times, each time giving the partial when the exchange is under way.
  void ExpectArrival(DeviceGroup& group, const ReferenceResult& want) {
    cudaStream_t writer = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking), cudaSuccess);
    const std::vector<std::byte> nothing(o_.bytes(), std::byte{0xff});
    std::vector<std::byte> o(o_.bytes()), lse(lse_.bytes());
    o_.Get(o.data(), stream_);
    lse_.Get(lse.data(), stream_);
    o_.Fill(0xff, stream_);
    lse_.Fill(0xff, stream_);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (int step = 0; step < 3; ++step) {
      Poison();
      DeviceExchangeParams params = Params();
      params.partial_arrives = true;
      const Status enqueued = group.Exchange(params, stream_);
      ASSERT_TRUE(enqueued.ok()) << Text(enqueued);
      std::this_thread::sleep_for(milliseconds(2));
      EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
      const size_t half = o.size() / 2;
      o_.Set(o.data(), writer, 0, half);
      lse_.Set(lse.data(), writer);
      o_.Set(o.data(), writer, half, o.size() - half);
      ASSERT_EQ(cudaStreamSynchronize(writer), cudaSuccess);
      const Status done = group.Await(stream_, Far());
      ASSERT_TRUE(done.ok()) << Text(done);
      Expect(want);
      std::vector<std::byte> left(o.size()), lse_left(lse.size());
      o_.Get(left.data(), stream_);
      lse_.Get(lse_left.data(), stream_);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      EXPECT_EQ(left, nothing);
      EXPECT_EQ(lse_left, std::vector<std::byte>(lse.size(), std::byte{0xff}));
    }
    EXPECT_EQ(cudaStreamDestroy(writer), cudaSuccess);
  }

  // Compares with the reference, and checks that nothing else was written.
  void Expect(const ReferenceResult& want) const {
    std::vector<std::byte> out(out_.bytes()), lse_out(lse_out_.bytes());
    out_.Get(out.data(), stream_);
    lse_out_.Get(lse_out.data(), stream_);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(out[out.size() - 1 - i], std::byte{kPoison}) << "written past out";
      ASSERT_EQ(lse_out[lse_out.size() - 1 - i], std::byte{kPoison}) << "written past lse_out";
    }
    // ag_rs adds in the wire's type.
    const DType coarse = case_.strategy == Strategy::kAgRs ? case_.wire : DType::kF32;
    const double relative = Unit(case_.out) + 4 * Unit(coarse) + 2e-6;
    for (int32_t row = 0; row < case_.rows; ++row) {
      for (int32_t h = 0; h < slice_.count; ++h) {
        const size_t pair = static_cast<size_t>(row) * case_.heads + slice_.begin + h;
        const size_t got = static_cast<size_t>(row) * slice_.count + h;
        float lse;
        std::memcpy(&lse, lse_out.data() + got * sizeof(float), sizeof(float));
        if (std::isinf(want.lse[pair])) {
          ASSERT_EQ(lse, want.lse[pair]) << "lse of row " << row << ", head " << h;
        } else {
          ASSERT_NEAR(lse, want.lse[pair], 1e-5 * (1 + std::abs(want.lse[pair])))
              << "lse of row " << row << ", head " << h;
        }
        for (int32_t d = 0; d < case_.value_dim; ++d) {
          const double value = LoadElement(case_.out, out.data(), got * case_.value_dim + d);
          const double expected = want.o[pair * case_.value_dim + d];
          // The largest partial is of order 1; sums of a few lose against that.
          ASSERT_NEAR(value, expected, relative * (1 + std::abs(expected)))
              << "row " << row << ", head " << h << " of the slice, dim " << d;
        }
      }
    }
  }

 private:
  static constexpr size_t kGuard = 64;
  // Half a unit in the last place, relatively.
  static double Unit(DType t) {
    return t == DType::kBf16 ? 1.0 / 256 : t == DType::kF16 ? 1.0 / 2048 : 0.0;
  }
  size_t Pairs() const { return static_cast<size_t>(case_.rows) * slice_.count; }

  const ExchangeCase case_;
  const cudaStream_t stream_;
  const HeadSlice slice_;
  const Elements encoded_;
  GpuBuffer o_, lse_, sinks_, out_, lse_out_;
};

// The merge, in float64, of what travels.
ReferenceResult Reference(const ExchangeCase& c, const Partials& p) {
  std::vector<std::vector<float>> travelled;
  std::vector<const float*> o, lse;
  for (size_t r = 0; r < p.o.size(); ++r) {
    travelled.push_back(Encode(c.wire, Encode(c.o, p.o[r]).values).values);
  }
  for (size_t r = 0; r < p.o.size(); ++r) {
    o.push_back(travelled[r].data());
    lse.push_back(p.lse[r].data());
  }
  return ReferenceMerge({.o = o,
                         .lse = lse,
                         .rows = c.rows,
                         .heads = c.heads,
                         .value_dim = c.value_dim,
                         .sinks = c.sinks ? p.sinks.data() : nullptr});
}

// Made before any rank runs: memory that is taken while a kernel waits for a peer may wait for that
// kernel.
std::vector<std::unique_ptr<RankCall>> MakeCalls(GpuGroup& group, const ExchangeCase& c,
                                                 const Partials& p) {
  std::vector<std::unique_ptr<RankCall>> calls;
  for (int r = 0; r < group.size(); ++r) {
    EXPECT_EQ(cudaSetDevice(group.device(r)), cudaSuccess);
    calls.push_back(std::make_unique<RankCall>(c, p, r, group.size(), group.rank(r).stream));
  }
  return calls;
}

void ExpectRight(GpuGroup& group, const ExchangeCase& c, uint32_t seed) {
  SCOPED_TRACE(c.Describe() + ", " + std::to_string(group.size()) + " ranks");
  const Partials p = RandomPartials(c, group.size(), seed);
  const ReferenceResult want = Reference(c, p);
  const auto calls = MakeCalls(group, c, p);
  OnEveryRank(group.size(), [&](int r) {
    ASSERT_EQ(cudaSetDevice(group.device(r)), cudaSuccess);
    GpuRank& rank = group.rank(r);
    const Status s = rank.group->Exchange(calls[r]->Params(), rank.stream);
    ASSERT_TRUE(s.ok()) << Text(s);
    const Status done = rank.group->Await(rank.stream, Far());
    ASSERT_TRUE(done.ok()) << Text(done);
    calls[r]->Expect(want);
  });
}

std::vector<Strategy> StrategiesOf(GpuGroup& group) {
  const DeviceExchangeCapability& capability = group.rank(0).group->capability();
  std::vector<Strategy> usable;
  for (const Strategy s : kStrategies) {
    const std::string& why = s == Strategy::kDirect ? capability.no_direct : capability.no_nccl;
    if (why.empty()) usable.push_back(s);
  }
  return usable;
}

struct GroupShape {
  int ranks;
  bool shared_gpu;
};

std::string NameOf(const testing::TestParamInfo<GroupShape>& info) {
  return std::to_string(info.param.ranks) + (info.param.shared_gpu ? "OnOneGpu" : "Gpus");
}

// Ranks on one GPU must run side by side there, which small groups do.
class ExchangeTest : public testing::TestWithParam<GroupShape> {
 protected:
  void SetUp() override { TRIBUTARY_SKIP_BELOW_GPUS(GetParam().shared_gpu ? 1 : GetParam().ranks); }

  std::unique_ptr<GpuGroup> MakeGroup(DeviceGroupOptions options = {}) {
    options.limits = {.rows = 96, .heads = 32, .value_dim = 128};
    // NCCL wants a GPU a rank.
    if (!GetParam().shared_gpu) options.nccl = Wanted::kYes;
    auto group = std::make_unique<GpuGroup>(GetParam().ranks, GetParam().shared_gpu, options);
    EXPECT_TRUE(group->usable());
    return group;
  }
};

TEST_P(ExchangeTest, EveryStrategyAndPlacement) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  const std::vector<Strategy> strategies = StrategiesOf(*group);
  ASSERT_THAT(strategies, testing::Contains(Strategy::kDirect))
      << group->rank(0).group->capability().no_direct;
  uint32_t seed = 0;
  for (const Strategy strategy : strategies) {
    for (const Placement placement : kPlacements) {
      for (const int32_t rows : {1, 5, 33}) {
        for (const int32_t heads : {1, 6, 32}) {
          ExpectRight(*group,
                      {.rows = rows,
                       .heads = heads,
                       .value_dim = 128,
                       .strategy = strategy,
                       .placement = placement,
                       .sinks = rows != 5},
                      ++seed);
          if (HasFatalFailure() || HasNonfatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(ExchangeTest, EveryTypeAndHeadDim) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  uint32_t seed = 100;
  for (const Strategy strategy : StrategiesOf(*group)) {
    for (const Placement placement : kPlacements) {
      for (const DType wire : {DType::kF32, DType::kBf16, DType::kF16}) {
        for (const DType out : {DType::kF32, DType::kBf16, DType::kF16}) {
          const int32_t value_dim = seed % 3 == 0 ? 64 : seed % 3 == 1 ? 128 : 256;
          ExpectRight(*group,
                      {.rows = 4,
                       .heads = 8,
                       .value_dim = value_dim,
                       .strategy = strategy,
                       .placement = placement,
                       .o = seed % 2 == 0 ? wire : DType::kF32,
                       .wire = wire,
                       .out = out,
                       .sinks = true},
                      ++seed);
          if (HasFatalFailure() || HasNonfatalFailure()) return;
        }
      }
    }
  }
}

// Both ways that gathered heads take, and blocks that send more than once.
TEST_P(ExchangeTest, EveryRouteOfDirect) {
  for (const int one_hop : {0, 1}) {
    for (const int blocks : {0, 1, 3}) {
      DeviceGroupOptions options;
      options.nccl = Wanted::kNo;
      options.direct_tuning.one_hop = one_hop;
      options.direct_tuning.blocks = blocks;
      options.direct_tuning.movers = 64;
      options.direct_tuning.overlap_launch = one_hop == 1;
      options.limits = {.rows = 512, .heads = 32, .value_dim = 128};
      GpuGroup group(GetParam().ranks, GetParam().shared_gpu, options);
      ASSERT_TRUE(group.usable());
      ExpectRight(group, {.rows = 3, .heads = 7, .placement = Placement::kGathered}, 7);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// The partial comes while the exchange is already waiting for it, one half after the other, and
// leaves its place as it was.
TEST_P(ExchangeTest, APartialThatArrivesLater) {
  for (const int one_hop : {0, 1}) {
    for (const Placement placement : kPlacements) {
      for (const DType wire : {DType::kF32, DType::kBf16}) {
        DeviceGroupOptions options;
        options.nccl = Wanted::kNo;
        options.direct_tuning.one_hop = one_hop;
        options.limits = {.rows = 512, .heads = 32, .value_dim = 128};
        GpuGroup group(GetParam().ranks, GetParam().shared_gpu, options);
        ASSERT_TRUE(group.usable());
        const ExchangeCase c{.rows = 9,
                             .heads = 12,
                             .value_dim = 128,
                             .placement = placement,
                             .o = DType::kF32,
                             .wire = wire,
                             .sinks = true};
        const Partials partials = RandomPartials(c, group.size(), 3);
        const ReferenceResult want = Reference(c, partials);
        const auto calls = MakeCalls(group, c, partials);
        OnEveryRank(group.size(), [&](int r) {
          ASSERT_EQ(cudaSetDevice(group.device(r)), cudaSuccess);
          calls[r]->ExpectArrival(*group.rank(r).group, want);
        });
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

// Steps of different shapes, placements and routes follow each other on the same memory.
TEST_P(ExchangeTest, ManySteps) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  std::vector<ExchangeCase> cases;
  std::vector<Partials> partials;
  std::vector<ReferenceResult> wanted;
  for (uint32_t i = 0; i < 8; ++i) {
    cases.push_back({.rows = static_cast<int32_t>(1 + 13 * i % 40),
                     .heads = i % 2 == 0 ? 16 : 6,
                     .value_dim = 64,
                     .placement = kPlacements[i / 2 % 2],
                     .sinks = i % 3 == 0});
    partials.push_back(RandomPartials(cases[i], group->size(), i));
    wanted.push_back(Reference(cases[i], partials[i]));
  }
#ifdef TRIBUTARY_SHORT_GRID
  constexpr int kSteps = 40;
#else
  constexpr int kSteps = 400;
#endif
  std::vector<std::vector<std::unique_ptr<RankCall>>> of_case;
  for (size_t i = 0; i < cases.size(); ++i) {
    of_case.push_back(MakeCalls(*group, cases[i], partials[i]));
  }
  OnEveryRank(group->size(), [&](int r) {
    ASSERT_EQ(cudaSetDevice(group->device(r)), cudaSuccess);
    GpuRank& rank = group->rank(r);
    for (int step = 0; step < kSteps; ++step) {
      const size_t i = step * 5 % cases.size();
      if (step % 50 == 0) of_case[i][r]->Poison();
      const Status s = rank.group->Exchange(of_case[i][r]->Params(), rank.stream);
      ASSERT_TRUE(s.ok()) << Text(s);
    }
    const Status done = rank.group->Await(rank.stream, Far());
    ASSERT_TRUE(done.ok()) << Text(done);
    for (size_t i = 0; i < cases.size(); ++i) of_case[i][r]->Expect(wanted[i]);
  });
}

// A captured exchange runs again and again, with other data in the same place.
TEST_P(ExchangeTest, ReplaysAsAGraph) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  for (const Strategy strategy : StrategiesOf(*group)) {
    for (const Placement placement : kPlacements) {
      const ExchangeCase c{.rows = 9, .heads = 8, .strategy = strategy, .placement = placement};
      SCOPED_TRACE(c.Describe());
      const Partials p = RandomPartials(c, group->size(), 77);
      const ReferenceResult want = Reference(c, p);
      const auto calls = MakeCalls(*group, c, p);
      OnEveryRank(group->size(), [&](int r) {
        ASSERT_EQ(cudaSetDevice(group->device(r)), cudaSuccess);
        GpuRank& rank = group->rank(r);
        RankCall& call = *calls[r];
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal),
                  cudaSuccess);
        call.Poison();  // a memset before it, and a kernel of its own kind
        Status s = rank.group->Exchange(call.Params(), rank.stream);
        if (s.ok()) s = rank.group->Exchange(call.Params(), rank.stream);
        ASSERT_EQ(cudaStreamEndCapture(rank.stream, &graph), cudaSuccess);
        ASSERT_TRUE(s.ok()) << Text(s);
        ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 5; ++replay) {
          ASSERT_EQ(cudaGraphLaunch(executable, rank.stream), cudaSuccess);
          const Status done = rank.group->Await(rank.stream, Far());
          ASSERT_TRUE(done.ok()) << Text(done);
          call.Expect(want);
        }
        // Before its group: NCCL keeps a communicator while a graph has operations of it.
        EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      });
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
  }
}

// Merged heads of all ranks, small whole numbers.
class GatherCall {
 public:
  static constexpr int32_t kRows = 5, kDim = 64;

  GatherCall(int32_t heads, DType type, int rank, int ranks, cudaStream_t stream)
      : heads_(heads),
        type_(type),
        rank_(rank),
        stream_(stream),
        slice_(SliceOfRank(heads, ranks, rank)),
        slice_o_(size_t{kRows} * slice_.count * kDim * SizeOf(type)),
        slice_lse_(size_t{kRows} * slice_.count * sizeof(float)),
        out_(size_t{kRows} * heads * kDim * SizeOf(type)),
        lse_out_(size_t{kRows} * heads * sizeof(float)) {
    std::vector<float> o, lse;
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t h = slice_.begin; h < slice_.begin + slice_.count; ++h) {
        lse.push_back(Lse(row * heads + h));
        for (int32_t d = 0; d < kDim; ++d) o.push_back(Value((row * heads + h) * kDim + d));
      }
    }
    slice_o_.Set(Encode(type, o).bytes.data(), stream);
    slice_lse_.Set(lse.data(), stream);
    out_.Fill(kPoison, stream);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }

  DeviceGatherParams Params() const {
    return {.slice = slice_o_.data(),
            .slice_lse = static_cast<float*>(slice_lse_.data()),
            .dtype = type_,
            .rows = kRows,
            .heads = heads_,
            .value_dim = kDim,
            .out = rank_ == 0 ? out_.data() : nullptr,
            .lse_out = rank_ == 0 ? static_cast<float*>(lse_out_.data()) : nullptr};
  }

  void ExpectWhole() const {
    std::vector<std::byte> o(out_.bytes());
    std::vector<float> lse(lse_out_.bytes() / sizeof(float));
    out_.Get(o.data(), stream_);
    lse_out_.Get(lse.data(), stream_);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (size_t i = 0; i < lse.size(); ++i) ASSERT_EQ(lse[i], Lse(i)) << "lse at " << i;
    for (size_t i = 0; i < lse.size() * kDim; ++i) {
      ASSERT_EQ(LoadElement(type_, o.data(), i), Value(i)) << "at " << i;
    }
  }

 private:
  static float Value(size_t i) { return static_cast<float>(i % 251) - 100; }
  static float Lse(size_t i) { return 0.5f * static_cast<float>(i); }

  const int32_t heads_;
  const DType type_;
  const int rank_;
  const cudaStream_t stream_;
  const HeadSlice slice_;
  GpuBuffer slice_o_, slice_lse_, out_, lse_out_;
};

TEST_P(ExchangeTest, GatherSlicesUndoesScattering) {
  for (const Wanted direct : {Wanted::kYes, Wanted::kNo}) {
    if (direct == Wanted::kNo && GetParam().shared_gpu) continue;
    DeviceGroupOptions options;
    options.direct = direct;
    const auto group = MakeGroup(options);
    ASSERT_TRUE(group->usable());
    for (const int32_t heads : {3, 16}) {
      for (const DType type : {DType::kBf16, DType::kF32}) {
        std::vector<std::unique_ptr<GatherCall>> calls;
        for (int r = 0; r < group->size(); ++r) {
          ASSERT_EQ(cudaSetDevice(group->device(r)), cudaSuccess);
          calls.push_back(
              std::make_unique<GatherCall>(heads, type, r, group->size(), group->rank(r).stream));
        }
        OnEveryRank(group->size(), [&](int r) {
          ASSERT_EQ(cudaSetDevice(group->device(r)), cudaSuccess);
          GpuRank& rank = group->rank(r);
          const Status s = rank.group->GatherSlices(calls[r]->Params(), rank.stream);
          ASSERT_TRUE(s.ok()) << Text(s);
          const Status done = rank.group->Await(rank.stream, Far());
          ASSERT_TRUE(done.ok()) << Text(done);
          if (r == 0) calls[r]->ExpectWhole();
        });
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

// A rank that does not come costs the others their bound, and the GPU stays usable.
TEST_P(ExchangeTest, AMissingRankBreaksTheGroup) {
  for (const Strategy strategy : {Strategy::kDirect, Strategy::kA2a}) {
    if (strategy != Strategy::kDirect && GetParam().shared_gpu) continue;
    DeviceGroupOptions options;
    options.direct_bound = milliseconds(200);
    const auto group = MakeGroup(options);
    ASSERT_TRUE(group->usable());
    const ExchangeCase c{.rows = 4, .strategy = strategy, .placement = Placement::kScattered};
    const Partials p = RandomPartials(c, group->size(), 5);
    const auto calls = MakeCalls(*group, c, p);
    const int missing = group->size() - 1;
    OnEveryRank(group->size(), [&](int r) {
      if (r == missing) return;
      ASSERT_EQ(cudaSetDevice(group->device(r)), cudaSuccess);
      GpuRank& rank = group->rank(r);
      RankCall& call = *calls[r];
      ASSERT_TRUE(rank.group->Exchange(call.Params(), rank.stream).ok());
      const Status s = rank.group->Await(rank.stream, After(milliseconds(1500)));
      EXPECT_THAT(s.code(), testing::AnyOf(StatusCode::kDeadlineExceeded, StatusCode::kUnavailable))
          << Text(s);
      EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess);
      // The first error stays, and nothing is enqueued after it.
      EXPECT_EQ(rank.group->Exchange(call.Params(), rank.stream).code(), s.code());
    });
    // Also where nobody waited: the peers told.
    if (strategy == Strategy::kDirect) {
      ASSERT_EQ(cudaSetDevice(group->device(missing)), cudaSuccess);
      GpuRank& rank = group->rank(missing);
      (void)rank.group->Exchange(calls[missing]->Params(), rank.stream);
      const Status s = rank.group->Await(rank.stream, Far());
      EXPECT_EQ(s.code(), StatusCode::kUnavailable) << Text(s);
    }
  }
  // A new epoch of the same GPUs works.
  DeviceGroupOptions next;
  next.epoch = 10;
  const auto group = MakeGroup(next);
  ASSERT_TRUE(group->usable());
  ExpectRight(*group, {.rows = 2}, 3);
}

TEST_P(ExchangeTest, NothingToExchange) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  for (const Strategy strategy : StrategiesOf(*group)) {
    for (const Placement placement : kPlacements) {
      ExpectRight(*group, {.rows = 0, .strategy = strategy, .placement = placement}, 1);
      ExpectRight(*group, {.heads = 0, .strategy = strategy, .placement = placement}, 1);
    }
  }
  ExpectRight(*group, {.rows = 2}, 1);
}

TEST_P(ExchangeTest, RefusalsLeaveTheGroupAsItWas) {
  const auto group = MakeGroup();
  ASSERT_TRUE(group->usable());
  const ExchangeCase c{.rows = 2, .placement = Placement::kScattered};
  const auto calls = MakeCalls(*group, c, RandomPartials(c, group->size(), 1));
  for (int r = 0; r < group->size(); ++r) {
    DeviceExchangeParams p = calls[r]->Params();
    p.value_dim = 12;
    EXPECT_EQ(group->rank(r).group->Exchange(p, group->rank(r).stream).code(),
              StatusCode::kInvalidArgument);
    p = calls[r]->Params();
    p.rows = 1 << 20;
    EXPECT_EQ(group->rank(r).group->Exchange(p, group->rank(r).stream).code(),
              StatusCode::kFailedPrecondition);
  }
  ExpectRight(*group, c, 1);
}

TEST_P(ExchangeTest, AbortEndsAWait) {
  DeviceGroupOptions options;
  options.direct_bound = std::chrono::seconds(50);
  const auto group = MakeGroup(options);
  ASSERT_TRUE(group->usable());
  const ExchangeCase c{.rows = 4, .placement = Placement::kScattered};
  const Partials p = RandomPartials(c, group->size(), 5);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  GpuRank& rank = group->rank(0);
  RankCall call(c, p, 0, group->size(), rank.stream);
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(rank.group->Exchange(call.Params(), rank.stream).ok());
  std::thread other([&] { group->rank(1).group->Abort("enough"); });
  const Status s = rank.group->Await(rank.stream, Far());
  other.join();
  EXPECT_EQ(s.code(), StatusCode::kUnavailable) << Text(s);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// Memory comes back when all ranks have left.
TEST_P(ExchangeTest, LeavesNoMemoryBehind) {
  auto retired = std::make_shared<RetiredMemory>();
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    DeviceGroupOptions options;
    options.epoch = epoch;
    options.retired = retired;
    const auto group = MakeGroup(options);
    ASSERT_TRUE(group->usable());
    ExpectRight(*group, {.rows = 2}, 3);
  }
  EXPECT_EQ(retired->Sweep(), 0u);
}

// Nothing travels, so nothing is rounded to the wire's type; sinks are applied all the same.
TEST(GroupOfOne, AppliesSinksAndConverts) {
  TRIBUTARY_SKIP_BELOW_GPUS(1);
  GpuGroup group(1, true);
  ASSERT_TRUE(group.usable());
  for (const Strategy strategy : kStrategies) {
    for (const Placement placement : kPlacements) {
      for (const DType type : {DType::kF32, DType::kBf16}) {
        ExpectRight(group,
                    {.strategy = strategy,
                     .placement = placement,
                     .o = type,
                     .wire = type,
                     .out = type,
                     .sinks = true},
                    9);
        if (HasFatalFailure() || HasNonfatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, ExchangeTest,
                         testing::Values(GroupShape{2, true}, GroupShape{4, true},
                                         GroupShape{8, true}, GroupShape{2, false},
                                         GroupShape{3, false}, GroupShape{4, false},
                                         GroupShape{8, false}),
                         NameOf);

// The other rank does not come, as far as this one knows; but it may have heard of this one's
// memory, and map it.
TEST(DirectExchange, MemoryThatWasAnnouncedOutlivesAFailedMeeting) {
  TRIBUTARY_SKIP_BELOW_GPUS(1);
  DirectOptions options;
  options.rank = 0;
  options.size = 2;
  options.layout = LayOutDirect(2, 16, 32, 128, DType::kF32);
  options.retired = std::make_shared<RetiredMemory>();
  MemoryRendezvous rendezvous;
  std::unique_ptr<DirectExchange> exchange;
  std::string why_not;
  const Status status =
      CreateDirectExchange(options, rendezvous, std::chrono::steady_clock::now() + milliseconds(50),
                           &exchange, &why_not);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(exchange, nullptr);
  EXPECT_GE(options.retired->Sweep(), options.layout.bytes(0));
}

}  // namespace
}  // namespace tributary::collective
