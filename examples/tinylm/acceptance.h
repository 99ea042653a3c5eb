// Acceptance lengths with their standard errors.
//
// The texts behind different prompts are independent of one another, the steps of one text are not.
// So the error comes from how much texts differ: that of a ratio of two sums over texts, by the
// first-order (linearised) variance of a ratio estimator, as in cluster sampling (Cochran, Sampling
// Techniques, chapter 6).
#pragma once

#include <vector>

#include "examples/tinylm/speculate.h"

namespace tributary::tinylm {

struct Estimate {
  double value = 0;
  double standard_error = 0;  // NaN of fewer than two texts
};

// Tokens per step over all texts: 1 when no guess is ever right, NaN when there is no step.
Estimate AcceptanceLength(const std::vector<SpeculationCounts>& texts);

// AcceptanceLength(texts) / AcceptanceLength(baseline), of texts behind the same prompts in the
// same order: what a pair has in common is no error of the ratio. Both are of one size.
Estimate AcceptanceRatio(const std::vector<SpeculationCounts>& texts,
                         const std::vector<SpeculationCounts>& baseline);

}  // namespace tributary::tinylm
