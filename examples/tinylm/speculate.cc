#include "examples/tinylm/speculate.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "examples/tinylm/generate.h"

namespace tributary::tinylm {
namespace {

std::vector<Token> Tokens(absl::string_view text) { return {text.begin(), text.end()}; }

std::vector<Token> MostLikely(const Matrix& logits) {
  std::vector<Token> tokens;
  for (int64_t row = 0; row < logits.rows(); ++row) {
    tokens.push_back(Sampler().Next(logits.row(row)));
  }
  return tokens;
}

// The caches of the model and of its draft behind one text. After Verify the model's holds tokens
// that may be wrong: Accept comes next.
class Speculation {
 public:
  Speculation(const Model& model, const Draft& draft, Attention& attention,
              DraftAttention& draft_attention)
      : model_(model),
        draft_(draft),
        attention_(attention),
        draft_attention_(draft_attention),
        tap_{.layers = draft.config().target_layers, .states = {}} {}

  // The token that the model writes behind the prompt.
  absl::StatusOr<Token> Begin(absl::string_view prompt) {
    if (absl::Status reset = attention_.Reset(); !reset.ok()) return reset;
    if (absl::Status reset = draft_attention_.Reset(); !reset.ok()) return reset;
    const absl::StatusOr<Matrix> logits = Run(Tokens(prompt));
    if (!logits.ok()) return logits.status();
    if (absl::Status kept = Keep(logits->rows()); !kept.ok()) return kept;
    return MostLikely(*logits).back();
  }

  // What the model writes behind `anchor`, the next token of the text: up to `rows` tokens, as many
  // as the draft's guesses give it in one call.
  absl::StatusOr<std::vector<Token>> Verify(Token anchor, int64_t rows) {
    std::vector<Token> tokens = {anchor};
    if (rows > 1) {
      const absl::StatusOr<Matrix> guessed = draft_.Guess(anchor, length_, rows, draft_attention_);
      if (!guessed.ok()) return guessed.status();
      const std::vector<Token> guesses = MostLikely(*guessed);
      tokens.insert(tokens.end(), guesses.begin(), guesses.end());
    }
    const absl::StatusOr<Matrix> logits = Run(std::move(tokens));
    if (!logits.ok()) return logits.status();
    std::vector<Token> written = MostLikely(*logits);
    // A row behind a wrong guess says nothing.
    const auto wrong = std::mismatch(verified_.begin() + 1, verified_.end(), written.begin()).first;
    written.resize(wrong - verified_.begin());
    return written;
  }

  // The text goes on with `tokens`, the anchor first.
  absl::Status Accept(const std::vector<Token>& tokens) {
    const auto [verified_end, kept_end] =
        std::mismatch(verified_.begin(), verified_.end(), tokens.begin(), tokens.end());
    if (verified_end != verified_.end()) {
      const int64_t end = length_ + (verified_end - verified_.begin());
      if (absl::Status status = attention_.Truncate(end); !status.ok()) return status;
    }
    if (absl::Status kept = Keep(kept_end - tokens.begin()); !kept.ok()) return kept;
    if (kept_end == tokens.end()) return absl::OkStatus();
    // The text is not what the model would have written.
    const absl::StatusOr<Matrix> logits = Run({kept_end, tokens.end()});
    return logits.ok() ? Keep(logits->rows()) : logits.status();
  }

 private:
  absl::StatusOr<Matrix> Run(std::vector<Token> tokens) {
    verified_ = std::move(tokens);
    return model_.Forward(verified_, length_, attention_, &tap_);
  }

  // The first `tokens` of the model's last call are part of the text.
  absl::Status Keep(int64_t tokens) {
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
  std::vector<Token> verified_;  // of the model's last call
  int64_t length_ = 0;           // tokens of the text that both caches have, the prompt included
};

absl::Status Check(const Model& model, absl::string_view prompt, int64_t count, int64_t block) {
  if (block < 2) return absl::InvalidArgumentError("a block has the anchor and one mask or more");
  return CheckLength(model, prompt, count);
}

// Steps up to `count` tokens of text. `text` has them all, or its first, and the model writes the
// others.
absl::StatusOr<SpeculationCounts> Steps(int64_t count, int64_t block, Speculation& speculation,
                                        std::string& text) {
  SpeculationCounts counts;
  for (int64_t at = 0; at + 1 < count;) {
    const absl::StatusOr<std::vector<Token>> written =
        speculation.Verify(static_cast<Token>(text[at]), std::min(block, count - at - 1));
    if (!written.ok()) return written.status();
    const auto given = static_cast<int64_t>(written->size());
    if (at + 1 == static_cast<int64_t>(text.size())) text.append(written->begin(), written->end());
    const absl::Status accepted = speculation.Accept(Tokens(text.substr(at, given)));
    if (!accepted.ok()) return accepted;
    at += given;
    ++counts.steps;
    counts.tokens += given;
  }
  return counts;
}

}  // namespace

absl::StatusOr<Speculated> Speculate(const Model& model, const Draft& draft,
                                     absl::string_view prompt, int64_t count, int64_t block,
                                     Attention& attention, DraftAttention& draft_attention) {
  if (absl::Status fits = Check(model, prompt, count, block); !fits.ok()) return fits;
  Speculation speculation(model, draft, attention, draft_attention);
  const absl::StatusOr<Token> first = speculation.Begin(prompt);
  if (!first.ok()) return first.status();
  Speculated result;
  result.text.push_back(static_cast<char>(*first));
  const auto counts = Steps(count, block, speculation, result.text);
  if (!counts.ok()) return counts.status();
  result.counts = *counts;
  return result;
}

absl::StatusOr<SpeculationCounts> SpeculateAlong(const Model& model, const Draft& draft,
                                                 absl::string_view prompt, absl::string_view text,
                                                 int64_t block, Attention& attention,
                                                 DraftAttention& draft_attention) {
  if (text.empty()) return absl::InvalidArgumentError("the text is empty");
  const auto count = static_cast<int64_t>(text.size());
  if (absl::Status fits = Check(model, prompt, count, block); !fits.ok()) return fits;
  Speculation speculation(model, draft, attention, draft_attention);
  if (const auto first = speculation.Begin(prompt); !first.ok()) return first.status();
  std::string given(text);
  return Steps(count, block, speculation, given);
}

}  // namespace tributary::tinylm
