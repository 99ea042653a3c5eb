// Standard errors of acceptance lengths: against sums done by hand, and against how much simulated
// samples really differ.
#include "examples/tinylm/acceptance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

namespace tributary::tinylm {
namespace {

using Texts = std::vector<SpeculationCounts>;

TEST(AcceptanceLength, IsTokensOverStepsOfAllTexts) {
  const Estimate estimate =
      AcceptanceLength({{.steps = 10, .tokens = 50}, {.steps = 30, .tokens = 70}});
  EXPECT_DOUBLE_EQ(estimate.value, 3.0);
  // The texts are 20 tokens above and below 3 per step; of 40 steps.
  EXPECT_DOUBLE_EQ(estimate.standard_error, std::sqrt(2.0 / 1.0 * (20 * 20 + 20 * 20)) / 40);
}

TEST(AcceptanceLength, HasNoErrorWhereTextsAgree) {
  const Estimate estimate =
      AcceptanceLength({{.steps = 2, .tokens = 10}, {.steps = 4, .tokens = 20}});
  EXPECT_DOUBLE_EQ(estimate.value, 5.0);
  EXPECT_DOUBLE_EQ(estimate.standard_error, 0.0);
}

TEST(AcceptanceLength, OfOneTextHasNoKnownError) {
  const Estimate estimate = AcceptanceLength({{.steps = 2, .tokens = 10}});
  EXPECT_DOUBLE_EQ(estimate.value, 5.0);
  EXPECT_TRUE(std::isnan(estimate.standard_error));
  EXPECT_TRUE(std::isnan(AcceptanceLength({}).value));
}

TEST(AcceptanceRatio, IsExactForPairsThatAreAlike) {
  const Texts texts = {{.steps = 10, .tokens = 60}, {.steps = 25, .tokens = 60}};
  EXPECT_DOUBLE_EQ(AcceptanceRatio(texts, texts).value, 1.0);
  EXPECT_DOUBLE_EQ(AcceptanceRatio(texts, texts).standard_error, 0.0);
  // Every text takes twice the steps.
  const Texts slower = {{.steps = 20, .tokens = 60}, {.steps = 50, .tokens = 60}};
  EXPECT_DOUBLE_EQ(AcceptanceRatio(slower, texts).value, 0.5);
  EXPECT_NEAR(AcceptanceRatio(slower, texts).standard_error, 0.0, 1e-15);
}

TEST(AcceptanceRatio, WeighsDifferencesOfPairs) {
  const Texts texts = {{.steps = 10, .tokens = 60}, {.steps = 20, .tokens = 60}};
  const Texts baseline = {{.steps = 20, .tokens = 60}, {.steps = 10, .tokens = 60}};
  const Estimate ratio = AcceptanceRatio(texts, baseline);
  EXPECT_DOUBLE_EQ(ratio.value, 1.0);
  // Each text is 20 of 120 tokens above or below 4 per step, its partner as much the other way.
  EXPECT_DOUBLE_EQ(ratio.standard_error, std::sqrt(2.0 * 2 * std::pow(40.0 / 120, 2)));
}

// Texts of 200 tokens by steps of 1 to 8, which some prompts make longer than others do.
SpeculationCounts Simulate(double ease, std::mt19937_64& random) {
  std::binomial_distribution<int64_t> accepted(7, ease);
  SpeculationCounts counts;
  while (counts.tokens < 200) {
    counts.tokens += std::min<int64_t>(1 + accepted(random), 200 - counts.tokens);
    ++counts.steps;
  }
  return counts;
}

struct Spread {
  double of_values = 0;  // their standard deviation over samples
  double stated = 0;     // the mean of the errors that the samples state
};

Spread Repeat(int samples, const std::function<Estimate()>& draw) {
  double sum = 0, squares = 0, errors = 0;
  for (int i = 0; i < samples; ++i) {
    const Estimate estimate = draw();
    sum += estimate.value;
    squares += estimate.value * estimate.value;
    errors += estimate.standard_error;
  }
  const double mean = sum / samples;
  return {.of_values = std::sqrt(squares / samples - mean * mean), .stated = errors / samples};
}

TEST(AcceptanceLength, StatesHowMuchSamplesDiffer) {
  std::mt19937_64 random(1);
  const Spread spread = Repeat(500, [&] {
    std::uniform_real_distribution<double> ease(0.3, 0.8);
    Texts texts;
    for (int i = 0; i < 64; ++i) texts.push_back(Simulate(ease(random), random));
    return AcceptanceLength(texts);
  });
  EXPECT_NEAR(spread.stated / spread.of_values, 1.0, 0.1);
}

TEST(AcceptanceRatio, OfPairsIsKnownBetterThanItsTerms) {
  std::mt19937_64 random(1);
  double of_length = 0;
  const Spread spread = Repeat(500, [&] {
    std::uniform_real_distribution<double> ease(0.3, 0.8);
    Texts texts, baseline;
    for (int i = 0; i < 64; ++i) {
      const double of_prompt = ease(random);
      texts.push_back(Simulate(of_prompt, random));
      baseline.push_back(Simulate(of_prompt, random));
    }
    const Estimate length = AcceptanceLength(texts);
    of_length = length.standard_error / length.value;
    return AcceptanceRatio(texts, baseline);
  });
  EXPECT_NEAR(spread.stated / spread.of_values, 1.0, 0.1);
  EXPECT_LT(spread.stated, of_length);
}

}  // namespace
}  // namespace tributary::tinylm
