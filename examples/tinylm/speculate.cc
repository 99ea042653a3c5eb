#include "examples/tinylm/speculate.h"

#include <algorithm>
#include <span>
#include <vector>

#include "examples/tinylm/generate.h"

namespace tributary::tinylm {
namespace {

Token MostLikely(const Matrix& logits, int64_t row) { return Sampler().Next(logits.row(row)); }

// One text in the making.
class Speculation {
 public:
  Speculation(const Model& model, const Draft& draft, Attention& attention,
              DraftAttention& draft_attention)
      : model_(model),
        draft_(draft),
        attention_(attention),
        draft_attention_(draft_attention),
        tap_{.layers = draft.config().target_layers, .states = {}} {}

  const std::string& text() const { return text_; }

  absl::Status Begin(absl::string_view prompt) {
    if (absl::Status reset = attention_.Reset(); !reset.ok()) return reset;
    if (absl::Status reset = draft_attention_.Reset(); !reset.ok()) return reset;
    const std::vector<Token> tokens(prompt.begin(), prompt.end());
    const absl::StatusOr<Matrix> logits = model_.Forward(tokens, 0, attention_, &tap_);
    if (!logits.ok()) return logits.status();
    text_.push_back(static_cast<char>(MostLikely(*logits, logits->rows() - 1)));
    return Accept(static_cast<int64_t>(tokens.size()));
  }

  // Up to `rows` tokens more; how many it were.
  absl::StatusOr<int64_t> Step(int64_t rows) {
    std::vector<Token> tokens = {static_cast<Token>(text_.back())};
    if (rows > 1) {
      const absl::StatusOr<Matrix> guessed =
          draft_.Guess(tokens[0], length_, rows, draft_attention_);
      if (!guessed.ok()) return guessed.status();
      for (int64_t row = 0; row < rows - 1; ++row) tokens.push_back(MostLikely(*guessed, row));
    }
    const absl::StatusOr<Matrix> logits = model_.Forward(tokens, length_, attention_, &tap_);
    if (!logits.ok()) return logits.status();
    int64_t given = 0;
    bool right = true;
    while (right && given < rows) {
      const Token token = MostLikely(*logits, given++);
      text_.push_back(static_cast<char>(token));
      right = given < rows && tokens[given] == token;
    }
    // The anchor and the accepted guesses stay, as many as tokens were given.
    if (given < rows) {
      if (absl::Status status = attention_.Truncate(length_ + given); !status.ok()) return status;
    }
    if (absl::Status status = Accept(given); !status.ok()) return status;
    return given;
  }

 private:
  // The first `tokens` of the model's last call are part of the text.
  absl::Status Accept(int64_t tokens) {
    const absl::Status status =
        draft_.Extend(length_, tap_.states.topRows(tokens), draft_attention_);
    length_ += tokens;
    return status;
  }

  const Model& model_;
  const Draft& draft_;
  Attention& attention_;
  DraftAttention& draft_attention_;
  StateTap tap_;
  std::string text_;    // its last token was not processed yet
  int64_t length_ = 0;  // tokens processed, the prompt included
};

}  // namespace

absl::StatusOr<std::string> Speculate(const Model& model, const Draft& draft,
                                      absl::string_view prompt, int64_t count, int64_t block,
                                      Attention& attention, DraftAttention& draft_attention,
                                      SpeculationCounts* counts) {
  if (block < 2) return absl::InvalidArgumentError("a block has the anchor and one mask or more");
  if (absl::Status fits = CheckLength(model, prompt, count); !fits.ok()) return fits;
  Speculation speculation(model, draft, attention, draft_attention);
  if (absl::Status begun = speculation.Begin(prompt); !begun.ok()) return begun;
  while (static_cast<int64_t>(speculation.text().size()) < count) {
    const int64_t missing = count - static_cast<int64_t>(speculation.text().size());
    const absl::StatusOr<int64_t> given = speculation.Step(std::min(block, missing));
    if (!given.ok()) return given.status();
    ++counts->steps;
    counts->tokens += *given;
  }
  return speculation.text();
}

}  // namespace tributary::tinylm
