// A block-diffusion draft (DFlash): guesses the next tokens of a text in one pass.
//
// Its context is made of the target's hidden states: for every token that the target has processed,
// Extend projects them to K and V of each draft layer. Its block is the anchor, the token known
// last, followed by masks; all rows see all of the context and the whole block, as far as the
// cache's windows allow. Embeddings and output head are the target's.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/transformer_ops.h"
#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

// The draft's attention over one sequence, with the cache of its context.
class DraftAttention {
 public:
  virtual ~DraftAttention() = default;

  // Keeps K/V of the context's tokens at first_position and on: [tokens, kv_heads * head_dim].
  virtual absl::Status Append(int32_t layer, int64_t first_position, const Matrix& k,
                              const Matrix& v) = 0;
  // Attention of a block behind a context of `position` tokens; its K/V are not kept.
  virtual absl::Status AttendBlock(int32_t layer, int64_t position, const Matrix& q,
                                   const Matrix& k, const Matrix& v, Matrix& out) = 0;
  // Forgets the context.
  virtual absl::Status Reset() = 0;
};

class Draft {
 public:
  // `target` outlives the draft.
  Draft(DraftWeights weights, const Model& target);

  const DraftConfig& config() const { return weights_.config; }

  // Extends the context by tokens at first_position and on. `states`: what the target's layers
  // config().target_layers left behind them for these tokens, side by side (StateTap).
  absl::Status Extend(int64_t first_position, const Matrix& states,
                      DraftAttention& attention) const;

  // Logits [block - 1, vocabulary] of the tokens behind `anchor`, which stands at `position`,
  // behind the whole context.
  absl::StatusOr<Matrix> Guess(Token anchor, int64_t position, int64_t block,
                               DraftAttention& attention) const;

 private:
  const DraftWeights weights_;
  const Model& target_;
  const Rope rope_;
};

}  // namespace tributary::tinylm
