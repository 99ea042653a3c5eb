#include "examples/tinylm/generate.h"

#include <vector>

#include "absl/strings/str_cat.h"

namespace tributary::tinylm {

Token Sampler::Next(const RowVector& logits) {
  Eigen::Index best = 0;
  const float top = logits.maxCoeff(&best);
  if (temperature_ <= 0) return static_cast<Token>(best);
  const RowVector weights = ((logits.array() - top) / temperature_).exp();
  std::discrete_distribution<int> draw(weights.data(), weights.data() + weights.size());
  return static_cast<Token>(draw(random_));
}

absl::Status CheckLength(const Model& model, absl::string_view prompt, int64_t count) {
  if (prompt.empty()) return absl::InvalidArgumentError("the prompt is empty");
  const int64_t room = model.config().max_positions - static_cast<int64_t>(prompt.size());
  if (count <= room) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat(
      "a prompt of ", prompt.size(), " bytes leaves room for ", room, " tokens, not ", count));
}

absl::StatusOr<std::string> Generate(const Model& model, absl::string_view prompt, int64_t count,
                                     Sampler sampler, Attention& attention,
                                     const std::function<void(Token)>& on_token) {
  if (absl::Status fits = CheckLength(model, prompt, count); !fits.ok()) return fits;
  if (absl::Status reset = attention.Reset(); !reset.ok()) return reset;
  std::string text;
  std::vector<Token> next(prompt.begin(), prompt.end());
  int64_t position = 0;
  while (static_cast<int64_t>(text.size()) < count) {
    const absl::StatusOr<Matrix> logits = model.Forward(next, position, attention);
    if (!logits.ok()) return logits.status();
    position += static_cast<int64_t>(next.size());
    const Token token = sampler.Next(logits->bottomRows(1));
    next = {token};
    text.push_back(static_cast<char>(token));
    if (on_token) on_token(token);
  }
  return text;
}

}  // namespace tributary::tinylm
