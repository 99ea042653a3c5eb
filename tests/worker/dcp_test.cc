// The correctness grid: every way a step can go, over ranks as threads, against the dense model.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "kernels/head_dims.h"
#include "tests/support/compare.h"
#include "tests/worker/ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"
#include "tests/worker/test_host.h"

namespace tributary::worker::testing {
namespace {

// ---- ranks x interleave, at the lengths where something begins or ends ------------------------

enum class Turn { kOne, kHalfPage, kPage };

class Boundary : public ::testing::TestWithParam<std::tuple<int, Turn, int>> {};

TEST_P(Boundary, Lengths) {
  const auto [size, turn, page_size] = GetParam();
  const int interleave = turn == Turn::kOne        ? 1
                         : turn == Turn::kHalfPage ? page_size / 2
                                                   : page_size;
  // Each KV type meets each interleave and each N.
  const DType kv_dtype = kKvDTypes[static_cast<size_t>(size + static_cast<int>(turn)) % 4];
  ThreadRanks ranks(size, Poisoned());
  RunBoundaryLengths(ranks, BoundarySpec(page_size, interleave, kv_dtype), {});
}

#ifdef TRIBUTARY_SHORT_GRID
const auto kSizes = ::testing::Values(1, 3, 4);
const auto kPageSizes = ::testing::Values(16);
#else
const auto kSizes = ::testing::Values(1, 2, 3, 4, 8);
const auto kPageSizes = ::testing::Values(16, 64);
#endif

std::string BoundaryName(const ::testing::TestParamInfo<Boundary::ParamType>& info) {
  const auto [size, turn, page_size] = info.param;
  const char* name = turn == Turn::kOne ? "1" : turn == Turn::kHalfPage ? "half" : "page";
  return "n" + std::to_string(size) + "_i" + name + "_page" + std::to_string(page_size);
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Boundary,
    ::testing::Combine(kSizes, ::testing::Values(Turn::kOne, Turn::kHalfPage, Turn::kPage),
                       kPageSizes),
    BoundaryName);

// ---- results: every format, in memory and in the reply ----------------------------------------

class Outputs : public ::testing::TestWithParam<int> {};

TEST_P(Outputs, AreTheNumbersInEveryFormatAndPlace) {
  const CacheSpec spec = GeometrySpec(DType::kFp8E4M3, 128, 4);
  const TestHost::Options options{.checks_outputs = true};
  ThreadRanks prompts(GetParam(), Poisoned());
  RunDecodeVerifyPrefill(prompts, spec, options, /*many=*/70);
  ThreadRanks batches(GetParam(), Poisoned());
  RunMixedBatches(batches, spec, options);
  ThreadRanks drafts(GetParam(), Poisoned());
  RunTwoDrafts(drafts, DraftSliceSpec(DType::kBf16, 128), options);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Outputs, ::testing::Values(1, 3));

// ---- geometry: KV types, head dims, groups ----------------------------------------------------

class Geometry : public ::testing::TestWithParam<std::tuple<DType, HeadDims, int>> {};

TEST_P(Geometry, DecodeVerifyPrefill) {
  const auto [kv_dtype, dims, group] = GetParam();
#ifdef TRIBUTARY_SHORT_GRID
  const int32_t many = 24;
#else
  const int32_t many = 64;
#endif
  ThreadRanks ranks(4, Poisoned());
  RunDecodeVerifyPrefill(ranks, GeometrySpec(kv_dtype, dims.key_dim, group, dims.value_dim),
                         InputsInTurn(dims.key_dim, group), many);
}

std::string GeometryName(const ::testing::TestParamInfo<Geometry::ParamType>& info) {
  const auto& [kv_dtype, dims, group] = info.param;
  return std::string(Name(kv_dtype)) + "_d" + std::to_string(dims.key_dim) + "_v" +
         std::to_string(dims.value_dim) + "_g" + std::to_string(group);
}

INSTANTIATE_TEST_SUITE_P(Grid, Geometry,
                         ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2,
                                                              DType::kBf16, DType::kF16,
                                                              DType::kF32, DType::kNvfp4),
                                            ::testing::ValuesIn(kHeadDims),
                                            ::testing::Values(1, 4, 8, 16)),
                         GeometryName);

// Layers that differ in heads and dims share sequences, pages and plans.
TEST(Dcp, HeadsAndDimsDifferFromLayerToLayer) {
  for (const int size : {1, 3, 4}) {
    ThreadRanks ranks(size, Poisoned());
    RunForkAndTruncate(ranks, LayersDifferSpec(), {});
    ThreadRanks again(size, Poisoned());
    RunDecodeVerifyPrefill(again, LayersDifferSpec(), {.q_dtype = DType::kF32}, 24);
  }
}

// ---- windows, sinks, soft cap -----------------------------------------------------------------

class Masks : public ::testing::TestWithParam<std::tuple<int, bool, float>> {};

TEST_P(Masks, ChunkedPrefillAndDecode) {
  const auto [window, sinks, soft_cap] = GetParam();
  ThreadRanks ranks(3, Poisoned());
  RunChunkedPrefill(ranks, MaskSpec(window, sinks, soft_cap), {}, {70, 9, 33, 1, 80});
}

INSTANTIATE_TEST_SUITE_P(Grid, Masks,
                         ::testing::Combine(::testing::Values(-1, 0, 1, 31, 1000),
                                            ::testing::Bool(), ::testing::Values(0.0f, 2.0f)));

// New tokens of a prompt meet queries as they are; what is in the cache meets them rounded.
TEST(Dcp, QueriesInFp8) {
  for (const int size : {1, 3}) {
    ThreadRanks ranks(size, Poisoned());
    RunDecodeVerifyPrefill(ranks, Fp8QueriesSpec(), {}, 24);
  }
}

// ---- exchange strategies ----------------------------------------------------------------------

class Strategies : public ::testing::TestWithParam<std::tuple<collective::Strategy, int>> {};

TEST_P(Strategies, MixedBatches) {
  const auto [strategy, size] = GetParam();
  CacheSpec spec = SmallSpec();
  SetHeads(&spec, 2, 3, 64);  // 6 heads: uneven over 4 ranks, fewer than 8
  spec.interleave = 2;
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  ExecutorOptions options = Poisoned();
  options.strategy = strategy;
  ThreadRanks ranks(size, options);
  RunMixedBatches(ranks, spec, {});
}

INSTANTIATE_TEST_SUITE_P(Grid, Strategies,
                         ::testing::Combine(::testing::Values(collective::Strategy::kAuto,
                                                              collective::Strategy::kAllGather,
                                                              collective::Strategy::kAgRs,
                                                              collective::Strategy::kA2a),
                                            ::testing::Values(1, 2, 4, 8)));

// ---- long prompts, passes ---------------------------------------------------------------------

TEST(Dcp, LongPrefillInChunksOf512) {
#ifdef TRIBUTARY_SHORT_GRID
  const std::vector<int32_t> chunks = {512, 100};
#else
  const std::vector<int32_t> chunks = {512, 512, 77, 512};
#endif
  ThreadRanks ranks(4, Poisoned(), /*threads_each=*/2);
  RunChunkedPrefill(ranks, Fp8Spec(1, 4, 100), {}, chunks);
}

// Thousands of tokens next to a few: the ranks' threads share one long sequence.
TEST(Dcp, LongAndShortSequencesInOneBatch) {
#ifdef TRIBUTARY_SHORT_GRID
  const int32_t tokens = 700;
#else
  const int32_t tokens = 4999;
#endif
  ThreadRanks ranks(4, Poisoned(), /*threads_each=*/2);
  RunLongAndShort(ranks, tokens, {});
}

// Cutting a step into passes changes memory, not results: not even in the last bit.
TEST(Dcp, PassesDoNotChangeResults) {
  CacheSpec spec = SmallSpec();
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  spec.layers[0].window.left = 50;
  std::vector<std::vector<float>> results;
  for (const int32_t rows_per_pass : {0, 1, 24}) {
    ExecutorOptions options = Poisoned();
    options.rows_per_pass = rows_per_pass;
    ThreadRanks ranks(4, options);
    TestHost host(ranks, spec, {});
    host.Open(1);
    host.Open(2);
    host.Step(StepKind::kPrefill, {{1, 60, 60}});
    host.Step(StepKind::kPrefill, {{1, 31, 31}, {2, 40, 40}});  // passes with and without context
    results.push_back(host.last_o());
    host.Step(StepKind::kDecode, {{2, 50, 50}, {1, 3, 3}});
    results.back().insert(results.back().end(), host.last_o().begin(), host.last_o().end());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// ---- sequences come, fork, roll back and go ---------------------------------------------------

class Lifecycle : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  CacheSpec Spec() const { return LifecycleSpec(std::get<1>(GetParam())); }
};

// Long enough that forks share whole runs on every rank.
TEST(Dcp, ForksThatReadTheirPagesTogether) {
  for (const int size : {1, 2}) {
    CacheSpec spec = SmallSpec();
    spec.num_pages = 512;
    spec.layers[0].sinks = SinksFor(spec.q_heads);
    ThreadRanks ranks(size, Poisoned());
    RunSharedForks(ranks, spec, {}, /*tokens=*/1024 * size + 7, /*forks=*/5);
  }
}

TEST_P(Lifecycle, ForkAndTruncate) {
  ThreadRanks ranks(std::get<0>(GetParam()), Poisoned());
  RunForkAndTruncate(ranks, Spec(), {});
}

TEST_P(Lifecycle, MixedBatches) {
  ThreadRanks ranks(std::get<0>(GetParam()), Poisoned());
  RunMixedBatches(ranks, Spec(), {});
}

TEST_P(Lifecycle, PoisonedSlots) {
  ThreadRanks ranks(std::get<0>(GetParam()), Poisoned());
  for (const DType kv_dtype : {DType::kFp8E4M3, DType::kBf16, DType::kNvfp4}) {
    CacheSpec spec = Spec();
    spec.kv_dtype = kv_dtype;
    RunPoisonedSlots(ranks, spec, {});
    Command drop;
    drop.epoch = ranks.epoch();
    drop.cache = 7;
    drop.body = DropCacheCommand{};
    ranks.Execute(drop);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, Lifecycle,
                         ::testing::Combine(::testing::Values(1, 3, 4), ::testing::Values(1, 16)));

// ---- the group's size does not show -----------------------------------------------------------

TEST(Dcp, OneRankAndFourAgreeWithinMergeRounding) {
  const auto run = [](int size) {
    ThreadRanks ranks(size, Poisoned());
    return RunOneSequence(ranks, {.q_dtype = DType::kF32});
  };
  const Results one = run(1);
  const Results four = run(4);
  // The same tensors were drawn. Every element is a weighted mean of values below 4 or an LSE below
  // 16: a few dozen roundings of fp32.
  EXPECT_TRUE(test::AllClose(four.o, one.o, {2e-5, 2e-5}, {static_cast<int64_t>(one.o.size())}));
  EXPECT_TRUE(
      test::AllClose(four.lse, one.lse, {2e-5, 2e-5}, {static_cast<int64_t>(one.lse.size())}));
}

// A sequence's result does not depend on what shares its batch.
TEST(Dcp, BatchCompanionsDoNotChangeResults) {
  const CacheSpec spec = SmallSpec();
  const auto run = [&](bool company) {
    ThreadRanks ranks(4, Poisoned());
    TestHost host(ranks, spec, {});
    host.Open(1);
    host.Open(2);
    host.Step(StepKind::kPrefill, {{1, 90, 90}});
    host.Step(StepKind::kAppend, {{2, 0, 33}});
    std::vector<Move> moves = {{1, 3, 3}};
    if (company) moves.push_back({2, 5, 5});
    host.Step(StepKind::kDecode, moves);
    std::vector<float> o = host.last_o();
    o.resize(static_cast<size_t>(3 * spec.q_heads * spec.head_dim));
    return o;
  };
  EXPECT_EQ(run(false), run(true));
}

// Nor do a prompt beside them, with or without tokens of its own, and sinks, change the bits of
// rows that decode or verify; and a prompt's rows do not depend on those.
TEST(Dcp, APromptBesideThemDoesNotChangeResults) {
  CacheSpec spec = SmallSpec();
  spec.layers[0].sinks = SinksFor(spec.q_heads);
  const size_t row = static_cast<size_t>(spec.q_heads * spec.head_dim);
  const Move decode{1, 3, 3}, verify{2, 64, 64}, prompt{3, 65, 65}, look_back{4, 70, 0, 2};
  const auto run = [&](int size, StepKind kind, const std::vector<Move>& moves,
                       const Move& of_interest) {
    ThreadRanks ranks(size, Poisoned());
    TestHost host(ranks, spec, {});
    for (SequenceId id = 1; id <= 4; ++id) host.Open(id);
    host.Step(StepKind::kPrefill, {{1, 90, 90}});
    host.Step(StepKind::kAppend, {{2, 0, 33}, {4, 0, 72}});
    host.Step(kind, moves);
    size_t first = 0;
    for (const Move& move : moves) {
      if (move.sequence == of_interest.sequence) break;
      first += static_cast<size_t>(move.query_rows) * row;
    }
    const auto begin = host.last_o().begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<float>(begin,
                              begin + static_cast<std::ptrdiff_t>(of_interest.query_rows * row));
  };
  for (const int size : {1, 2, 4}) {
    for (const Move& of_interest : {decode, verify, look_back}) {
      EXPECT_EQ(run(size, StepKind::kDecode, {of_interest}, of_interest),
                run(size, StepKind::kPrefill, {decode, prompt, verify, look_back}, of_interest))
          << "sequence " << of_interest.sequence << " on " << size << " ranks";
    }
    EXPECT_EQ(run(size, StepKind::kPrefill, {prompt}, prompt),
              run(size, StepKind::kPrefill, {decode, verify, prompt, look_back}, prompt))
        << size << " ranks";
  }
}

}  // namespace
}  // namespace tributary::worker::testing
