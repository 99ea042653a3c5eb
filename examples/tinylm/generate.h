// Text from a model, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/tinylm/model.h"

namespace tributary::tinylm {

// Picks the next token from a row of logits: the most likely one at temperature 0 (the lowest of
// equals), else a draw from softmax(logits / temperature).
class Sampler {
 public:
  explicit Sampler(float temperature = 0, uint64_t seed = 0)
      : temperature_(temperature), random_(seed) {}

  Token Next(const RowVector& logits);

 private:
  const float temperature_;
  std::mt19937_64 random_;
};

// INVALID_ARGUMENT for an empty prompt, OUT_OF_RANGE when prompt and text are longer than the
// model's positions.
absl::Status CheckLength(const Model& model, absl::string_view prompt, int64_t count);

// Resets `attention`, runs the prompt in one call per layer, then `count` tokens one by one, each
// told to `on_token` as it comes. Returns the generated text without the prompt. Errors of
// CheckLength, of the model and of the attention.
absl::StatusOr<std::string> Generate(const Model& model, absl::string_view prompt, int64_t count,
                                     Sampler sampler, Attention& attention,
                                     const std::function<void(Token)>& on_token = {});

}  // namespace tributary::tinylm
