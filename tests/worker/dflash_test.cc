// DFlash over ranks as threads, against the dense model: every mask, KV type, block size and
// context length, and the causal steps that share its caches.

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/head_dims.h"
#include "tests/support/compare.h"
#include "tests/worker/ranks.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"
#include "tests/worker/test_host.h"

namespace tributary::worker::testing {
namespace {

// Draft models as they are published, and what lies between them.
std::vector<LayerSpec> Masks() {
  return {
      DraftLayer({-1, -1}, WindowBase::kQuery, false),   // full attention
      DraftLayer({20, -1}, WindowBase::kQuery, false),   // each row its own lower bound
      DraftLayer({20, -1}, WindowBase::kAnchor, false),  // one lower bound for the block
      DraftLayer({20, 20}, WindowBase::kQuery, false),   // both ways
      DraftLayer({3, 2}, WindowBase::kQuery, false),     // smaller than the block
      DraftLayer({5, 4}, WindowBase::kAnchor, false),
      DraftLayer({0, 0}, WindowBase::kQuery, false),  // a row sees itself
      DraftLayer({17, -1}, WindowBase::kQuery, true),
      DraftLayer({17, 3}, WindowBase::kAnchor, true),
      DraftLayer({100'000, 100'000}, WindowBase::kAnchor, false),
  };
}

// ---- ranks x interleave x page ----------------------------------------------------------------

class Grid : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(Grid, EveryMaskAtEveryBoundary) {
  const auto [size, page_size, turns] = GetParam();
  CacheSpec spec = SmallSpec();
  spec.page_size = page_size;
  spec.interleave = page_size / turns;
  spec.num_pages = 96;
  spec.layers = Masks();
  // KV types, sinks and soft caps go round the layers, so that each meets each mask over the grid.
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const size_t turn = i + static_cast<size_t>(size) + (turns > 1 ? 1 : 0);
    spec.layers[i].kv_dtype = kKvDTypes[turn % 4];
    if (turn % 3 == 0) spec.layers[i].sinks = {-1.0f, 0.0f, 0.5f, 2.0f};
    if (turn % 5 == 0) spec.layers[i].soft_cap = 3.0f;
  }
  ThreadRanks ranks(size, Poisoned());
  RunDrafts(ranks, spec, {});
}

#ifdef TRIBUTARY_SHORT_GRID
const auto kSizes = ::testing::Values(1, 3);
const auto kTurns = ::testing::Values(16);
#else
const auto kSizes = ::testing::Values(1, 2, 3, 4);
const auto kTurns = ::testing::Values(1, 16);
#endif

std::string GridName(const ::testing::TestParamInfo<Grid::ParamType>& info) {
  const auto [size, page_size, turns] = info.param;
  return "n" + std::to_string(size) + "_page" + std::to_string(page_size) + "_i" +
         std::to_string(page_size / turns);
}

INSTANTIATE_TEST_SUITE_P(All, Grid, ::testing::Combine(kSizes, ::testing::Values(16), kTurns),
                         GridName);

// ---- types and geometry -----------------------------------------------------------------------

class Types : public ::testing::TestWithParam<std::tuple<DType, DType, HeadDims>> {};

TEST_P(Types, QueriesAndBlockKeepTheirPrecision) {
  const auto& [kv_dtype, input, dims] = GetParam();
  ThreadRanks ranks(3, Poisoned());
  RunTwoDrafts(ranks, DraftSliceSpec(kv_dtype, dims.key_dim, dims.value_dim),
               {.q_dtype = input, .input_dtype = input});
}

INSTANTIATE_TEST_SUITE_P(
    All, Types,
    ::testing::Combine(::testing::Values(DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16,
                                         DType::kF16, DType::kF32, DType::kNvfp4),
                       ::testing::Values(DType::kF32, DType::kBf16, DType::kF16),
                       ::testing::ValuesIn(kHeadDims)));

TEST(Dflash, MoreRanksThanHeads) {
  CacheSpec spec = SmallSpec();
  spec.kv_heads = 1;
  spec.q_heads = 2;
  spec.interleave = 1;
  ThreadRanks ranks(4, Poisoned());
  RunDrafts(ranks, spec, {});
}

TEST(Dflash, HeadsAndDimsDifferFromLayerToLayer) {
  for (const int size : {1, 3}) {
    ThreadRanks ranks(size, Poisoned());
    RunDrafts(ranks, LayersDifferSpec(), {});
  }
}

TEST(Dflash, QueriesInFp8MeetTheirBlockAsTheyAre) {
  for (const int size : {1, 3}) {
    ThreadRanks ranks(size, Poisoned());
    RunTwoDrafts(ranks, Fp8QueriesSpec(), {});
  }
}

// ---- what else shares the cache ---------------------------------------------------------------

// A model with alternating windows, of a KV type a layer, under DCP: nothing is replicated.
TEST(CausalLayers, WindowsTypesSinksAndSoftCapsDifferFromLayerToLayer) {
  for (const int size : {1, 3, 4}) {
    ThreadRanks ranks(size, Poisoned());
    RunForkAndTruncate(ranks, EveryLayerTypeSpec(), {});
  }
}

TEST(Dflash, PassesDoNotChangeResults) {
  CacheSpec spec = SmallSpec();
  spec.layers = {DraftLayer({9, 9}, WindowBase::kQuery, false)};
  spec.layers[0].sinks = {0.0f, 1.0f, -1.0f, 0.5f};
  std::vector<std::vector<float>> results;
  for (const int32_t rows_per_pass : {0, 1, 11}) {
    ExecutorOptions options = Poisoned();
    options.rows_per_pass = rows_per_pass;
    ThreadRanks ranks(3, options);
    TestHost host(ranks, spec, {});
    host.Open(1);
    host.Open(2);
    host.Step(StepKind::kAppend, {{1, 0, 100}});
    host.Step(StepKind::kDflash, {{1, 16, 16}, {2, 8, 8}});
    results.push_back(host.last_o());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(Dflash, BatchCompanionsDoNotChangeResults) {
  const CacheSpec spec = SmallSpec();
  const auto run = [&](bool company) {
    ThreadRanks ranks(4, Poisoned());
    TestHost host(ranks, spec, {});
    for (SequenceId id = 1; id <= 3; ++id) host.Open(id);
    host.Step(StepKind::kAppend, {{1, 0, 90}, {2, 0, 33}});
    std::vector<Move> moves = {{1, 8, 8}};
    if (company) moves.insert(moves.end(), {{2, 16, 16}, {3, 5, 5}});
    host.Step(StepKind::kDflash, moves);
    std::vector<float> o = host.last_o();
    o.resize(static_cast<size_t>(8 * spec.q_heads * spec.head_dim));
    return o;
  };
  EXPECT_EQ(run(false), run(true));
}

TEST(Dflash, OneRankAndFourAgreeWithinMergeRounding) {
  CacheSpec spec = SmallSpec();
  spec.kv_dtype = DType::kFp8E4M3;
  spec.layers = {DraftLayer({40, -1}, WindowBase::kAnchor, false)};
  spec.layers[0].sinks = {0.0f, 1.0f, -1.0f, 0.5f};
  const auto run = [&](int size) {
    ThreadRanks ranks(size, Poisoned());
    TestHost host(ranks, spec, {.q_dtype = DType::kF32});
    host.Open(1);
    host.Step(StepKind::kAppend, {{1, 0, 200}});
    host.Step(StepKind::kDflash, {{1, 16, 16}});
    std::vector<float> all = host.last_o();
    all.insert(all.end(), host.last_lse().begin(), host.last_lse().end());
    return all;
  };
  const std::vector<float> one = run(1);
  EXPECT_TRUE(test::AllClose(run(4), one, {2e-5, 2e-5}, {static_cast<int64_t>(one.size())}));
}

}  // namespace
}  // namespace tributary::worker::testing
