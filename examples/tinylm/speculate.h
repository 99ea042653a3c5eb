// Text from a model, several tokens a step: a draft guesses, the model verifies.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/draft.h"
#include "examples/tinylm/model.h"

namespace tributary::tinylm {

struct SpeculationCounts {
  int64_t steps = 0;   // of verification
  int64_t tokens = 0;  // that they gave: guesses accepted, and the model's own after them

  // Tokens a step; 1 when no guess is ever right.
  double acceptance_length() const {
    return steps == 0 ? 0 : static_cast<double>(tokens) / static_cast<double>(steps);
  }
};

// The most likely text, the same as Generate writes with Sampler(). Resets both attentions, runs
// the prompt, and then, step by step: the draft guesses block - 1 tokens behind the one known last,
// the model verifies them in one causal call, the cache is truncated behind the first wrong one,
// and the draft's context is extended by what was accepted. Adds to `counts`. Errors as of
// Generate, and INVALID_ARGUMENT for a block below 2.
absl::StatusOr<std::string> Speculate(const Model& model, const Draft& draft,
                                      absl::string_view prompt, int64_t count, int64_t block,
                                      Attention& attention, DraftAttention& draft_attention,
                                      SpeculationCounts* counts);

}  // namespace tributary::tinylm
