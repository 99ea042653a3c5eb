#include "examples/tinylm/acceptance.h"

#include <cmath>
#include <limits>

namespace tributary::tinylm {
namespace {

SpeculationCounts Sum(const std::vector<SpeculationCounts>& texts) {
  SpeculationCounts sum;
  for (const SpeculationCounts& text : texts) {
    sum.steps += text.steps;
    sum.tokens += text.tokens;
  }
  return sum;
}

double TokensAStep(const SpeculationCounts& counts) {
  return static_cast<double>(counts.tokens) / static_cast<double>(counts.steps);
}

// By how much each text alone raises the acceptance length, relative to it. They add up to 0.
std::vector<double> Influences(const std::vector<SpeculationCounts>& texts) {
  const SpeculationCounts sum = Sum(texts);
  const double length = TokensAStep(sum);
  std::vector<double> influences;
  influences.reserve(texts.size());
  for (const SpeculationCounts& text : texts) {
    const double excess =
        static_cast<double>(text.tokens) - length * static_cast<double>(text.steps);
    influences.push_back(excess / static_cast<double>(sum.tokens));
  }
  return influences;
}

// The standard error of a sum of these, which add up to 0.
double StandardError(const std::vector<double>& influences) {
  const auto count = static_cast<double>(influences.size());
  if (count < 2) return std::numeric_limits<double>::quiet_NaN();
  double squares = 0;
  for (const double influence : influences) squares += influence * influence;
  return std::sqrt(squares * count / (count - 1));
}

}  // namespace

Estimate AcceptanceLength(const std::vector<SpeculationCounts>& texts) {
  const double length = TokensAStep(Sum(texts));
  return {.value = length, .standard_error = length * StandardError(Influences(texts))};
}

Estimate AcceptanceRatio(const std::vector<SpeculationCounts>& texts,
                         const std::vector<SpeculationCounts>& baseline) {
  const double ratio = TokensAStep(Sum(texts)) / TokensAStep(Sum(baseline));
  std::vector<double> influences = Influences(texts);
  const std::vector<double> of_baseline = Influences(baseline);
  for (size_t i = 0; i < influences.size(); ++i) influences[i] -= of_baseline[i];
  return {.value = ratio, .standard_error = ratio * StandardError(influences)};
}

}  // namespace tributary::tinylm
