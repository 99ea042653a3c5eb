// The correctness grid of a worker, on GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/cuda/gpu_ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"
#include "tests/worker/test_host.h"
#include "worker/backends.h"

namespace tributary::worker::testing {
namespace {

// ---- ranks x interleave, at the lengths where something begins or ends ------------------------

class GpuBoundary : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(GpuBoundary, Lengths) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [size, interleave, page_size] = GetParam();
  const DType kv_dtype = kKvDTypes[static_cast<size_t>(size + interleave) % 4];
  GpuRanks ranks(size);
  RunBoundaryLengths(ranks,
                     BoundarySpec(page_size, interleave == 0 ? page_size : interleave, kv_dtype),
                     GpuTolerance());
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuBoundary,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(0, 1, 8), ::testing::Values(16, 64)));

// ---- results: every format, in memory, pinned or not, and in the reply -------------------------

class GpuOutputs : public ::testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(GpuOutputs, AreTheNumbersInEveryFormatAndPlace) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [size, input] = GetParam();
  const CacheSpec spec = GeometrySpec(DType::kFp8E4M3, 128, 4);
  TestHost::Options options = GpuTolerance({.q_dtype = input, .input_dtype = input});
  options.checks_outputs = true;
  options.pin = [](std::byte* data, size_t bytes) { return PinHostMemory(0, data, bytes); };
  // What one rank does is the same in any company, and so has the same bits when it is repeated.
  GpuRanks prompts(size, {.batch_invariant = true});
  RunDecodeVerifyPrefill(prompts, spec, options, /*many=*/300);
  GpuRanks batches(size, {.batch_invariant = true});
  RunMixedBatches(batches, spec, options);
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuOutputs,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(DType::kBf16, DType::kF32)));

// ---- geometry: KV types, head dims, groups ----------------------------------------------------

class GpuGeometry : public ::testing::TestWithParam<std::tuple<DType, int, int>> {};

TEST_P(GpuGeometry, DecodeVerifyPrefill) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [kv_dtype, head_dim, group] = GetParam();
  for (const int size : {1, 2}) {
    SCOPED_TRACE(size);
    GpuRanks ranks(size);
    RunDecodeVerifyPrefill(ranks, GeometrySpec(kv_dtype, head_dim, group),
                           GpuTolerance(InputsInTurn(head_dim, group)), /*many=*/64);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuGeometry,
                         ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2,
                                                              DType::kBf16, DType::kF16,
                                                              DType::kNvfp4),
                                            ::testing::Values(64, 128, 256),
                                            ::testing::Values(1, 4, 8, 16)));

// ---- windows, sinks, soft cap -----------------------------------------------------------------

class GpuMasks : public ::testing::TestWithParam<std::tuple<int, bool, float, int>> {};

TEST_P(GpuMasks, ChunkedPrefillAndDecode) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [window, sinks, soft_cap, size] = GetParam();
  GpuRanks ranks(size);
  RunChunkedPrefill(ranks, MaskSpec(window, sinks, soft_cap), GpuTolerance(), {70, 9, 33, 1, 80});
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuMasks,
                         ::testing::Combine(::testing::Values(-1, 0, 31), ::testing::Bool(),
                                            ::testing::Values(0.0f, 2.0f),
                                            ::testing::Values(1, 3)));

// ---- sequences come, fork, roll back and go ---------------------------------------------------

class GpuLifecycle : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  CacheSpec Spec() const { return LifecycleSpec(std::get<1>(GetParam())); }
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
  for (const DType kv_dtype : {DType::kFp8E4M3, DType::kBf16, DType::kNvfp4}) {
    GpuRanks ranks(size());
    CacheSpec spec = Spec();
    spec.kv_dtype = kv_dtype;
    RunPoisonedSlots(ranks, spec, GpuTolerance());
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuLifecycle,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Values(1, 16)));

// ---- pages that sequences share -----------------------------------------------------------------

class GpuSharedForks : public ::testing::TestWithParam<std::tuple<int, DType, bool>> {};

// So many tokens that sharing them is worth it on every rank.
TEST_P(GpuSharedForks, GiveWhatTheyGiveApart) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [size, kv_dtype, portable] = GetParam();
  GpuRanks ranks(size, {.portable = portable});
  RunSharedForks(ranks, ForksSpec(kv_dtype), GpuTolerance(), /*tokens=*/3 * 1024 * size + 7,
                 /*forks=*/16);
}

INSTANTIATE_TEST_SUITE_P(Grid, GpuSharedForks,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(DType::kFp8E4M3, DType::kBf16),
                                            ::testing::Bool()));

// ---- drafts -----------------------------------------------------------------------------------

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
                                            ::testing::Values(DType::kFp8E4M3, DType::kBf16,
                                                              DType::kNvfp4),
                                            ::testing::Bool()));

class GpuDraftTypes : public ::testing::TestWithParam<std::tuple<DType, DType, int, int>> {};

TEST_P(GpuDraftTypes, SlicesThatBeginInsideAGroup) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto [kv_dtype, input, head_dim, size] = GetParam();
  GpuRanks ranks(size);
  RunTwoDrafts(ranks, DraftSliceSpec(kv_dtype, head_dim),
               GpuTolerance({.q_dtype = input, .input_dtype = input}));
}

INSTANTIATE_TEST_SUITE_P(
    Grid, GpuDraftTypes,
    ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16,
                                         DType::kF16, DType::kNvfp4),
                       ::testing::Values(DType::kF32, DType::kBf16, DType::kF16),
                       ::testing::Values(64, 128, 256), ::testing::Values(1, 3)));

TEST(Gpu, LayersOfEveryType) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const int size : {1, 3}) {
    GpuRanks ranks(size);
    RunForkAndTruncate(ranks, EveryLayerTypeSpec(), GpuTolerance());
  }
}

TEST(Gpu, QueriesInFp8) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const bool portable : {false, true}) {
    for (const int size : {1, 3}) {
      GpuRanks ranks(size, {.portable = portable});
      RunDecodeVerifyPrefill(ranks, Fp8QueriesSpec(), GpuTolerance(), 80);
      RunTwoDrafts(ranks, Fp8QueriesSpec(), GpuTolerance());
    }
  }
}

// Outputs in f32 are as precise as BackendCapabilities tell: values of unit variance, decode, a
// verify, a prompt and drafts, over contexts of few tokens and of many, by every kernel.
TEST(Gpu, F32OutputsAreAsPreciseAsTold) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (const bool portable : {false, true}) {
    for (const OutputError& told : CudaBackend().f32_output_errors) {
      SCOPED_TRACE(std::string(Name(told.q)) + " over " + Name(told.kv) +
                   (portable ? ", portable" : ""));
      double few_rows = 0;
      double many_rows = 0;
      for (const int group : {4, 16}) {
        CacheSpec spec = GeometrySpec(told.kv, 128, group);
        spec.num_pages = 256;
        const TestHost::Options options =
            GpuTolerance({.q_dtype = told.q, .input_dtype = told.q, .seed = 3});
        GpuRanks ranks(1, {.portable = portable});
        TestHost few(ranks, spec, options);
        few.Open(1);
        for (int step = 0; step < 12; ++step) few.Step(StepKind::kDecode, {{1, 1, 1}});
        few.Step(StepKind::kDecode, {{1, 8, 8}});
        few.Step(StepKind::kAppend, {{1, 0, 900}});
        for (int step = 0; step < 4; ++step) few.Step(StepKind::kDecode, {{1, 4, 4}});
        few_rows = std::max(few_rows, few.worst_o());
        GpuRanks others(1, {.portable = portable});
        TestHost many(others, spec, options);
        many.Open(1);
        many.Step(StepKind::kPrefill, {{1, 80, 80}});
        many.Step(StepKind::kPrefill, {{1, 200, 200}});
        for (int step = 0; step < 4; ++step) many.Step(StepKind::kDflash, {{1, 16, 16}});
        many_rows = std::max(many_rows, many.worst_o());
      }
      EXPECT_LE(few_rows, told.few_rows);
      EXPECT_LE(many_rows, told.many_rows);
      std::printf("%s over %s: %.1e of few rows, %.1e of many\n", Name(told.q), Name(told.kv),
                  few_rows, many_rows);
    }
  }
}

// The same drafts over a context that grows: from the second on they can be graphs.
std::vector<float> DraftMany(bool graphs) {
  GpuRanks ranks(1, {.graphs = graphs});
  TestHost host(ranks, Fp8Spec(2, 4, 40),
                GpuTolerance({.q_dtype = DType::kBf16, .input_dtype = DType::kBf16}));
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
      GpuRanks ranks(size, {.portable = portable});
      RunLongAndShort(ranks, 4999, TightGpuTolerance());
    }
  }
}

TEST(Gpu, LongPrefillInChunks) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = Fp8Spec(1, 4, 100);
  spec.num_pages = 128;
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
      ExecutorOptions options = Poisoned();
      options.rows_per_pass = rows_per_pass;
      ThreadRanks ranks(GpuBackends(size, {}), options);
      RunStepsInPasses(ranks, spec, GpuTolerance());
    }
  }
}

// ---- graphs and batches change nothing --------------------------------------------------------

// Rows of decode steps one after the other, of a few sequences; every step comes twice, so that the
// second can be a graph.
std::vector<float> DecodeMany(const CudaBackendOptions& options, bool company) {
  const CacheSpec spec = Fp8Spec(2, 4, 40);
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

// The rows of one sequence's prompt, which comes in three parts, each beside other prompts or
// alone.
std::vector<float> PromptInParts(const CudaBackendOptions& options, bool company) {
  const CacheSpec spec = Fp8Spec(2, 4, 40);
  GpuRanks ranks(1, options);
  TestHost host(ranks, spec, GpuTolerance());
  for (const SequenceId sequence : {1, 2, 3}) host.Open(sequence);
  std::vector<float> all;
  for (const int32_t rows : {300, 90, 150}) {
    std::vector<Move> moves = {{1, rows, rows}};
    if (company) moves.insert(moves.end(), {{2, 200 - rows / 2, 200 - rows / 2}, {3, 20, 20}});
    host.Step(StepKind::kPrefill, moves);
    const auto count = static_cast<ptrdiff_t>(spec.q_heads * spec.head_dim) * rows;
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
  EXPECT_EQ(PromptInParts(options, true), PromptInParts(options, false));
}

// A GPU and the CPU agree as closely as their arithmetic lets them.
TEST(Gpu, OneRankAndFourAgree) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto run = [](int size) {
    GpuRanks ranks(size);
    return RunOneSequence(ranks, GpuTolerance({.q_dtype = DType::kF16})).o;
  };
  const std::vector<float> one = run(1);
  const std::vector<float> four = run(4);
  EXPECT_TRUE(test::AllClose(four, one, {2e-2, 0}, {static_cast<int64_t>(one.size())}));
}

}  // namespace
}  // namespace tributary::worker::testing
