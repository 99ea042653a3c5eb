// Text from a model, several tokens per step: a draft guesses, the model verifies.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/draft.h"
#include "examples/tinylm/model.h"

namespace tributary::tinylm {

// What one text came to.
struct SpeculationCounts {
  int64_t steps = 0;   // of verification
  int64_t tokens = 0;  // that they gave: guesses accepted, and the model's own after them
};

struct Speculated {
  std::string text;
  SpeculationCounts counts;
};

// The most likely text, the same as Generate writes with Sampler(). Resets both attentions, runs
// the prompt, and then, step by step: the draft guesses block - 1 tokens behind the one known last,
// the model verifies them in one causal call, the cache is truncated behind the first wrong one,
// and the draft's context is extended by what was accepted. Errors as of Generate, and
// INVALID_ARGUMENT for a block below 2.
absl::StatusOr<Speculated> Speculate(const Model& model, const Draft& draft,
                                     absl::string_view prompt, int64_t count, int64_t block,
                                     Attention& attention, DraftAttention& draft_attention);

// The same along a text that is given. A step accepts what the model itself would write behind the
// text so far, and goes on behind as many of the text's own tokens. Along the text that Speculate
// writes the counts are Speculate's. So models that would each write another text are compared on
// one and the same. INVALID_ARGUMENT for an empty text.
absl::StatusOr<SpeculationCounts> SpeculateAlong(const Model& model, const Draft& draft,
                                                 absl::string_view prompt, absl::string_view text,
                                                 int64_t block, Attention& attention,
                                                 DraftAttention& draft_attention);

}  // namespace tributary::tinylm
