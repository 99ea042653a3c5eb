// The correctness grid of a worker, on GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/cuda/gpu_ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"

namespace tributary::worker::testing {
namespace {

// ---- ranks x interleave, at the lengths where something begins or ends ------------------------

class GpuBoundary : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(GpuBoundary, Lengths) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [size, interleave, page_size] = GetParam();
  CacheSpec spec = SmallSpec();
  spec.page_size = page_size;
  spec.interleave = interleave == 0 ? page_size : interleave;
  spec.num_pages = 96;
  spec.layers.resize(3);
  spec.layers[1].window.left = 3;
  spec.layers[2].window.left = 20;
  spec.layers[2].sinks = SinksFor(spec.q_heads);
  const DType kv_dtypes[] = {DType::kBf16, DType::kFp8E4M3, DType::kF16, DType::kFp8E5M2};
  spec.kv_dtype = kv_dtypes[(size + interleave) % 4];
  GpuRanks ranks(size);
  RunBoundaryLengths(ranks, spec, GpuTolerance());
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuBoundary,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(0, 1, 8), ::testing::Values(16, 64)));

// ---- geometry: KV types, head dims, groups ----------------------------------------------------

class GpuGeometry : public ::testing::TestWithParam<std::tuple<DType, int, int>> {};

TEST_P(GpuGeometry, DecodeVerifyPrefill) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [kv_dtype, head_dim, group] = GetParam();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, /*kv_heads=*/2, group, head_dim);
  spec.kv_dtype = kv_dtype;
  spec.interleave = 4;
  spec.layers[0].k_scale = ScalesFor(spec.kv_heads, 0.02f);
  spec.layers[0].v_scale = {0.03f};
  TestHost::Options options;
  const DType inputs[] = {DType::kBf16, DType::kF16, DType::kF32};
  options.q_dtype = inputs[static_cast<size_t>(group) % 3];
  options.input_dtype = inputs[static_cast<size_t>(head_dim / 64 + group) % 3];
  for (const int size : {1, 2}) {
    SCOPED_TRACE(size);
    GpuRanks ranks(size);
    TestHost host(ranks, spec, GpuTolerance(options));
    host.Open(1);
    host.Open(2);
    host.Step(StepKind::kPrefill, {{1, 37, 37}, {2, 5, 5}});
    host.Step(StepKind::kPrefill, {{2, 70, 70}});
    host.Step(StepKind::kDecode, {{1, 1, 1}, {2, 1, 1}});
    host.Step(StepKind::kDecode, {{2, 4, 4}, {1, 1, 1}});
    host.Step(StepKind::kDecode, {{2, 64, 64}, {1, 1, 1}});
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuGeometry,
                         ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2,
                                                              DType::kBf16, DType::kF16),
                                            ::testing::Values(64, 128, 256),
                                            ::testing::Values(1, 4, 8, 16)));

// ---- windows, sinks, soft cap -----------------------------------------------------------------

class GpuMasks : public ::testing::TestWithParam<std::tuple<int, bool, float, int>> {};

TEST_P(GpuMasks, ChunkedPrefillAndDecode) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [window, sinks, soft_cap, size] = GetParam();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 1, 5, 64);  // 5 heads over 3 ranks: slices of 2, 2 and 1
  spec.interleave = 8;
  spec.soft_cap = soft_cap;
  spec.layers[0].window.left = window;
  if (sinks) spec.layers[0].sinks = SinksFor(spec.q_heads);
  GpuRanks ranks(size);
  RunChunkedPrefill(ranks, spec, GpuTolerance(), {70, 9, 33, 1, 80});
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuMasks,
                         ::testing::Combine(::testing::Values(-1, 0, 31), ::testing::Bool(),
                                            ::testing::Values(0.0f, 2.0f),
                                            ::testing::Values(1, 3)));

// ---- sequences come, fork, roll back and go ---------------------------------------------------

class GpuLifecycle : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  CacheSpec Spec() const {
    CacheSpec spec = SmallSpec();
    spec.interleave = std::get<1>(GetParam());
    spec.layers.resize(2);
    spec.layers[1].window.left = 11;
    return spec;
  }
  int size() const { return std::get<0>(GetParam()); }
};

TEST_P(GpuLifecycle, ForkAndTruncate) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  GpuRanks ranks(size());
  RunForkAndTruncate(ranks, Spec(), GpuTolerance());
}

TEST_P(GpuLifecycle, MixedBatches) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  GpuRanks ranks(size());
  RunMixedBatches(ranks, Spec(), GpuTolerance());
}

TEST_P(GpuLifecycle, PoisonedSlots) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const DType kv_dtype : {DType::kFp8E4M3, DType::kBf16}) {
    GpuRanks ranks(size());
    CacheSpec spec = Spec();
    spec.kv_dtype = kv_dtype;
    RunPoisonedSlots(ranks, spec, GpuTolerance());
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuLifecycle,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Values(1, 16)));

// ---- drafts -----------------------------------------------------------------------------------

LayerSpec DraftLayer(Window window, WindowBase base, bool causal) {
  LayerSpec layer;
  layer.window = window;
  layer.window_base = base;
  layer.causal_block = causal;
  return layer;
}

class GpuDrafts : public ::testing::TestWithParam<std::tuple<int, int, DType, bool>> {};

// Every mask, with windows smaller than the block, at the edges of pages and shards, and larger
// than the context; a KV type and a soft cap of its own for some layers.
TEST_P(GpuDrafts, EveryMaskOverEveryLength) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [size, interleave, kv_dtype, portable] = GetParam();
  CacheSpec spec = SmallSpec();
  spec.num_pages = 96;
  spec.interleave = interleave;
  spec.kv_dtype = kv_dtype;
  spec.layers = {DraftLayer({-1, -1}, WindowBase::kQuery, false),
                 DraftLayer({5, 5}, WindowBase::kQuery, false),
                 DraftLayer({16, -1}, WindowBase::kAnchor, false),
                 DraftLayer({20, 3}, WindowBase::kAnchor, true),
                 DraftLayer({1000, 0}, WindowBase::kQuery, true)};
  spec.layers[1].sinks = SinksFor(spec.q_heads);
  spec.layers[3].sinks = SinksFor(spec.q_heads);
  spec.layers[2].kv_dtype = DType::kBf16;
  spec.layers[4].soft_cap = 2.0f;
  GpuRanks ranks(size, {.portable = portable});
  RunDrafts(ranks, spec, GpuTolerance());
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuDrafts,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(1, 16),
                                            ::testing::Values(DType::kFp8E4M3, DType::kBf16),
                                            ::testing::Bool()));

class GpuDraftTypes : public ::testing::TestWithParam<std::tuple<DType, DType, int, int>> {};

TEST_P(GpuDraftTypes, SlicesThatBeginInsideAGroup) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [kv_dtype, input, head_dim, size] = GetParam();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 2, 5, head_dim);
  spec.kv_dtype = kv_dtype;
  spec.interleave = 4;
  spec.layers = {DraftLayer({30, 30}, WindowBase::kQuery, false)};
  spec.layers[0].k_scale = {0.02f, 0.03f};
  spec.layers[0].v_scale = {0.04f};
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  GpuRanks ranks(size);
  TestHost host(ranks, spec, GpuTolerance({.q_dtype = input, .input_dtype = input}));
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kAppend, {{1, 0, 77}});
  for (int again = 0; again < 3; ++again) host.Step(StepKind::kDflash, {{2, 8, 8}, {1, 16, 16}});
}

INSTANTIATE_TEST_SUITE_P(
    Grid, GpuDraftTypes,
    ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16,
                                         DType::kF16),
                       ::testing::Values(DType::kF32, DType::kBf16, DType::kF16),
                       ::testing::Values(64, 128, 256), ::testing::Values(1, 3)));

TEST(Gpu, LayersOfEveryType) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = SmallSpec();
  spec.interleave = 8;
  spec.layers.assign(6, {});
  const DType kv_dtypes[] = {DType::kBf16, DType::kFp8E4M3, DType::kF16, DType::kFp8E5M2};
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (i % 2 == 0) spec.layers[i].window.left = 12;
    spec.layers[i].kv_dtype = kv_dtypes[i % 4];
    if (i % 3 == 0) spec.layers[i].sinks = SinksFor(spec.q_heads);
    if (i % 3 == 1) spec.layers[i].soft_cap = 2.0f;
  }
  for (const int size : {1, 3}) {
    GpuRanks ranks(size);
    RunForkAndTruncate(ranks, spec, GpuTolerance());
  }
}

// The same drafts over a context that grows: from the second on they can be graphs.
std::vector<float> DraftMany(bool graphs) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 2, 4, 128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers.resize(2);
  spec.layers[1].window.left = 40;
  spec.layers[1].sinks = SinksFor(spec.q_heads);
  GpuRanks ranks(1, {.graphs = graphs});
  TestHost host(ranks, spec, GpuTolerance({.q_dtype = DType::kBf16, .input_dtype = DType::kBf16}));
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kAppend, {{1, 0, 300}, {2, 0, 33}});
  std::vector<float> all;
  for (int step = 0; step < 8; ++step) {
    host.Step(StepKind::kDflash, {{1, 16, 16}, {2, 8 + step % 2, 8 + step % 2}});
    all.insert(all.end(), host.last_o().begin(), host.last_o().end());
    host.Step(StepKind::kAppend, {{1, 0, 5}, {2, 0, 3}});
  }
  return all;
}

TEST(Gpu, GraphsOfDraftsChangeNothing) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  EXPECT_EQ(DraftMany(true), DraftMany(false));
}

// So many that their contexts leave no multiprocessor idle.
TEST(Gpu, DraftsOfManySequences) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  constexpr SequenceId kSequences = 80;
  for (const int size : {1, 2}) {
    CacheSpec spec = SmallSpec();
    SetHeads(&spec, 2, 5, 128);
    spec.kv_dtype = DType::kFp8E4M3;
    spec.num_pages = 512;
    spec.layers = {DraftLayer({-1, -1}, WindowBase::kQuery, false),
                   DraftLayer({20, 3}, WindowBase::kAnchor, true)};
    spec.layers[1].sinks = SinksFor(spec.q_heads);
    GpuRanks ranks(size);
    TestHost host(ranks, spec, GpuTolerance());
    std::vector<Move> contexts, blocks;
    for (SequenceId id = 1; id <= kSequences; ++id) {
      host.Open(id);
      const auto length = static_cast<int32_t>(id % 7 * 11);
      if (length > 0) contexts.push_back({id, 0, length});
      const auto rows = static_cast<int32_t>(1 + id % 16);
      blocks.push_back({id, rows, rows});
    }
    host.Step(StepKind::kAppend, contexts);
    for (int again = 0; again < 3; ++again) host.Step(StepKind::kDflash, blocks);
  }
}

// ---- long ones --------------------------------------------------------------------------------

TEST(Gpu, LongAndShortSequencesInOneBatch) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int size : {1, 4}) {
    for (const bool portable : {false, true}) {
      CacheSpec spec = SmallSpec();
      SetHeads(&spec, 2, 8, 128);
      spec.kv_dtype = DType::kFp8E4M3;
      spec.interleave = 8;
      spec.num_pages = 512 / size;
      spec.layers.resize(2);
      spec.layers[1].window.left = 1024;
      GpuRanks ranks(size, {.portable = portable});
      TestHost host(ranks, spec, TightGpuTolerance());
      for (SequenceId id = 1; id <= 4; ++id) host.Open(id);
      host.Step(StepKind::kAppend, {{1, 0, 4999}, {2, 0, 3}, {4, 0, 200}});
      host.Step(StepKind::kDecode, {{2, 1, 1}, {1, 1, 1}, {3, 1, 1}, {4, 4, 4}});
      host.Step(StepKind::kDecode, {{1, 16, 16}});
    }
  }
}

TEST(Gpu, LongPrefillInChunks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 1, 4, 128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.num_pages = 128;
  spec.layers.resize(2);
  spec.layers[1].window.left = 100;
  spec.layers[1].sinks = SinksFor(spec.q_heads);
  for (const int size : {1, 4}) {
    GpuRanks ranks(size);
    RunChunkedPrefill(ranks, spec, GpuTolerance(), {512, 512, 77, 200});
  }
}

// Rows of one step in several passes, few and many of a sequence, with and without context.
TEST(Gpu, StepsInPasses) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = SmallSpec();
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  spec.layers[0].window.left = 50;
  for (const int size : {1, 3}) {
    for (const int32_t rows_per_pass : {1, 24, 100}) {
      SCOPED_TRACE(rows_per_pass);
      ExecutorOptions options;
      options.page_fill = PageFill::kPoison;
      options.rows_per_pass = rows_per_pass;
      ThreadRanks ranks(GpuBackends(size, {}), options);
      TestHost host(ranks, spec, GpuTolerance());
      for (SequenceId id = 1; id <= 3; ++id) host.Open(id);
      host.Step(StepKind::kPrefill, {{1, 60, 60}});
      host.Step(StepKind::kPrefill, {{1, 31, 31}, {2, 40, 40}});
      host.Step(StepKind::kPrefill, {{2, 90, 90}, {1, 3, 0, 5}, {3, 1, 1}});
      host.Step(StepKind::kDecode, {{2, 50, 50}, {1, 3, 3}});
    }
  }
}

// ---- graphs and batches change nothing --------------------------------------------------------

// Rows of decode steps one after the other, of a few sequences; every step comes twice, so that the
// second can be a graph.
std::vector<float> DecodeMany(const CudaBackendOptions& options, bool company) {
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 2, 4, 128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers.resize(2);
  spec.layers[1].window.left = 40;
  spec.layers[1].sinks = SinksFor(spec.q_heads);
  GpuRanks ranks(1, options);
  TestHost host(ranks, spec, TightGpuTolerance());
  host.Open(1);
  host.Open(2);
  host.Step(StepKind::kAppend, {{1, 0, 300}, {2, 0, 33}});
  std::vector<float> all;
  for (int step = 0; step < 12; ++step) {
    std::vector<Move> moves = {{1, 1, 1}};
    if (company) moves.push_back({2, step % 3 + 1, step % 3 + 1});
    host.Step(StepKind::kDecode, moves);
    const auto count = static_cast<ptrdiff_t>(spec.q_heads * spec.head_dim);
    all.insert(all.end(), host.last_o().begin(), host.last_o().begin() + count);
  }
  return all;
}

TEST(Gpu, GraphsChangeNothing) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  EXPECT_EQ(DecodeMany({.graphs = true}, true), DecodeMany({.graphs = false}, true));
}

TEST(Gpu, BatchInvariantResultsDoNotDependOnTheBatch) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const CudaBackendOptions options{.batch_invariant = true};
  EXPECT_EQ(DecodeMany(options, true), DecodeMany(options, false));
}

// A GPU and the CPU agree as closely as their arithmetic lets them.
TEST(Gpu, OneRankAndFourAgree) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 2, 4, 128);
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  const auto run = [&](int size) {
    GpuRanks ranks(size);
    TestHost host(ranks, spec, GpuTolerance({.q_dtype = DType::kF16}));
    host.Open(1);
    std::vector<float> all;
    for (const auto& [kind, rows] : {std::pair{StepKind::kPrefill, 200},
                                     {StepKind::kPrefill, 100},
                                     {StepKind::kDecode, 1},
                                     {StepKind::kDecode, 4}}) {
      host.Step(kind, {{1, rows, rows}});
      all.insert(all.end(), host.last_o().begin(), host.last_o().end());
    }
    return all;
  };
  const std::vector<float> one = run(1);
  const std::vector<float> four = run(4);
  EXPECT_TRUE(test::AllClose(four, one, {2e-2, 0}, {static_cast<int64_t>(one.size())}));
}

}  // namespace
}  // namespace tributary::worker::testing
