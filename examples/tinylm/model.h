// The forward pass of a Llama-shaped model in fp32; attention is somebody else's.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

// A byte of text. Unsigned, so that it indexes the embedding.
using Token = uint8_t;

class Model {
 public:
  explicit Model(Weights weights);

  const ModelConfig& config() const { return weights_.config; }

  // Logits [tokens, vocab] of the token after each of `tokens`, which stand at positions
  // first_position and on. OUT_OF_RANGE beyond config().max_positions; else attention's errors.
  absl::StatusOr<Matrix> Forward(std::span<const Token> tokens, int64_t first_position,
                                 Attention& attention) const;

 private:
  void Rotate(int64_t first_position, int32_t heads, Matrix& x) const;

  const Weights weights_;
  Matrix cos_;  // [max_positions, head_dim / 2]
  Matrix sin_;
};

}  // namespace tributary::tinylm
