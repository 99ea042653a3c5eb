// The forward pass of a Llama-shaped model in fp32. An Attention computes the attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/transformer_ops.h"
#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

// A byte of text. Unsigned, so that it indexes the embedding.
using Token = uint8_t;

// Keeps what some layers leave behind them, for a draft.
struct StateTap {
  std::vector<int32_t> layers;  // the first is 0
  Matrix states;                // [tokens of the last call, layers.size() * hidden]

  void Take(int32_t layer, const Matrix& x);
};

class Model {
 public:
  explicit Model(Weights weights);

  const ModelConfig& config() const { return weights_.config; }
  const Weights& weights() const { return weights_; }
  // [vocab, hidden]
  const Matrix& head() const {
    return config().tied_embeddings ? weights_.embedding : weights_.lm_head;
  }

  // Logits [tokens, vocab] of the token after each of `tokens`, which stand at positions
  // first_position and on. Fills `tap` if there is one. OUT_OF_RANGE beyond config().max_positions;
  // else attention's errors.
  absl::StatusOr<Matrix> Forward(std::span<const Token> tokens, int64_t first_position,
                                 Attention& attention, StateTap* tap = nullptr) const;

 private:
  const Weights weights_;
  const Rope rope_;
};

}  // namespace tributary::tinylm
