// Perplexity through the service, and how little the cache's type and the number of workers change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "examples/tinylm/evaluate.h"
#include "examples/tinylm/local_attention.h"
#include "tests/examples/fixtures.h"

namespace tributary::tinylm {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

#ifdef TRIBUTARY_SHORT_GRID
constexpr int64_t kWindows = 2;
constexpr int64_t kWindowBytes = 160;
#else
constexpr int64_t kWindows = 8;
constexpr int64_t kWindowBytes = 1024;
#endif
constexpr int64_t kChunk = 64;  // read back from the cache, not attended in full precision

Evaluation MustEvaluate(const std::vector<std::string>& windows, int64_t chunk,
                        Attention& attention) {
  absl::StatusOr<Evaluation> evaluation = Evaluate(ShippedModel(), windows, chunk, attention);
  EXPECT_TRUE(evaluation.ok()) << evaluation.status();
  return evaluation.ok() ? *std::move(evaluation) : Evaluation{};
}

// With scales from the start of the sample, which Sample() leaves out; computed once.
const ServiceCacheOptions& Calibrated(DType kv_dtype) {
  static std::map<DType, ServiceCacheOptions> calibrated;
  const auto [it, fresh] = calibrated.try_emplace(kv_dtype);
  if (!fresh) return it->second;
  const auto scales = CalibrateScales(ShippedModel(), HeldOutSample().substr(0, 1024), kv_dtype);
  EXPECT_TRUE(scales.ok()) << scales.status();
  it->second = {.kv_dtype = kv_dtype, .scales = scales.value_or(std::vector<LayerScales>{})};
  return it->second;
}

std::vector<std::string> Sample() {
  return Windows(HeldOutSample().substr(1024), kWindows, kWindowBytes);
}

// What fp32 attention makes of the sample; computed once.
const Evaluation& ExactEvaluation() {
  static const Evaluation evaluation = [] {
    LocalAttention local(ShippedModel().config());
    return MustEvaluate(Sample(), kChunk, local);
  }();
  return evaluation;
}

TEST(Windows, SpreadOverTheText) {
  EXPECT_THAT(Windows("abcdefgh", 3, 2), testing::ElementsAre("ab", "de", "gh"));
  EXPECT_THAT(Windows("abc", 3, 2), testing::ElementsAre("ab"));
  EXPECT_THAT(Windows("a", 3, 2), testing::IsEmpty());
}

TEST(Evaluate, ThatTheShippedModelHasLearnt) {
  const Evaluation& evaluation = ExactEvaluation();
  EXPECT_THAT(evaluation.greedy, SizeIs(kWindows * (kWindowBytes - 1)));
  EXPECT_LT(evaluation.perplexity, 3.5);  // of 256 possible bytes; prose without context gives 16
  EXPECT_GT(evaluation.perplexity, 1.5);
  EXPECT_EQ(GreedyAgreement(evaluation, evaluation), 1.0);
}

TEST(Evaluate, Fp8CostsLessThanAPercentOfPerplexity) {
  const Evaluation& exact = ExactEvaluation();
  const Service service = StartService(4);
  const RemoteAttention remote = OpenAttention(service, Calibrated(DType::kFp8E4M3));
  const Evaluation rounded = MustEvaluate(Sample(), kChunk, *remote.attention);
  std::printf("perplexity: fp32 %.5f, DCP4 fp8_e4m3 %.5f; same greedy %.2f%%\n", exact.perplexity,
              rounded.perplexity, 100 * GreedyAgreement(exact, rounded));
  EXPECT_NEAR(rounded.perplexity / exact.perplexity, 1.0, 0.01);
  EXPECT_GT(GreedyAgreement(exact, rounded), 0.95);
}

TEST(Evaluate, WorkersDoNotChangeTheAnswer) {
  const std::vector<std::string> windows = Windows(HeldOutSample(), 2, kWindowBytes);
  for (const DType kv_dtype : {DType::kBf16, DType::kFp8E4M3}) {
    std::vector<Evaluation> evaluations;
    for (const int workers : {1, 4}) {
      const Service service = StartService(workers);
      const RemoteAttention remote = OpenAttention(service, Calibrated(kv_dtype));
      evaluations.push_back(MustEvaluate(windows, kChunk, *remote.attention));
    }
    // The shards hold the same numbers and only the order of sums differs, in the last bits. But a
    // last bit may tip the rounding of a key or value of the next layer, by 2^-9 of it in bf16 and
    // by 2^-4 in FP8, and that goes on through layers and tokens. service_attention_test.cc shows
    // that one layer with the same inputs agrees to the last bits.
    const double most = kv_dtype == DType::kBf16 ? 1e-4 : 1e-3;
    EXPECT_NEAR(evaluations[0].perplexity / evaluations[1].perplexity, 1.0, most) << Name(kv_dtype);
    EXPECT_GT(GreedyAgreement(evaluations[0], evaluations[1]), 1 - 10 * most) << Name(kv_dtype);
  }
}

TEST(Evaluate, DecodingTokenByTokenScoresAsChunksDo) {
  const std::vector<std::string> window = Windows(HeldOutSample(), 1, kWindowBytes / 4);
  const Service service = StartService(4);
  const RemoteAttention remote = OpenAttention(service, Calibrated(DType::kFp8E4M3));
  const Evaluation chunks = MustEvaluate(window, kChunk, *remote.attention);
  const Evaluation steps = MustEvaluate(window, 1, *remote.attention);
  EXPECT_NEAR(chunks.perplexity, steps.perplexity, 1e-3);
  EXPECT_GT(GreedyAgreement(chunks, steps), 0.99);
}

TEST(CalibrateScales, PutsTheLargestValueInRange) {
  const ModelConfig& config = ShippedModel().config();
  const auto scales = CalibrateScales(ShippedModel(), "And it came to pass", DType::kFp8E4M3);
  ASSERT_TRUE(scales.ok()) << scales.status();
  ASSERT_THAT(*scales, SizeIs(config.layers));
  for (const LayerScales& layer : *scales) {
    EXPECT_THAT(layer.k, SizeIs(config.kv_heads));
    EXPECT_THAT(layer.v, SizeIs(config.kv_heads));
    EXPECT_THAT(layer.k, Each(testing::AllOf(testing::Gt(1e-6f), testing::Lt(1.0f))));
    EXPECT_THAT(layer.v, Each(testing::AllOf(testing::Gt(1e-6f), testing::Lt(1.0f))));
  }
  const auto none = CalibrateScales(ShippedModel(), "And", DType::kBf16);
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->empty());
}

}  // namespace
}  // namespace tributary::tinylm
