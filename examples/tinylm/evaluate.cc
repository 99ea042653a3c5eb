#include "examples/tinylm/evaluate.h"

#include <algorithm>
#include <cmath>

#include "examples/tinylm/local_attention.h"
#include "kernels/float4.h"
#include "kernels/float8.h"

namespace tributary::tinylm {
namespace {

constexpr float kHeadroom = 2.0f;

// The largest number that a cache of the type holds with a scale of 1. The type has scales.
float Largest(DType kv_dtype) {
  if (kv_dtype == DType::kNvfp4) return Float4E2M1Format::kMax * Float8E4M3Format::kMax;
  return kv_dtype == DType::kFp8E4M3 ? Float8E4M3Format::kMax : Float8E5M2Format::kMax;
}

// Keeps what a draft's context would be kept as.
class ContextRecorder final : public DraftAttention {
 public:
  absl::Status Append(int32_t, int64_t, const Matrix& k, const Matrix& v) override {
    keys.push_back(k);
    values.push_back(v);
    return absl::OkStatus();
  }
  absl::Status AttendBlock(int32_t, int64_t, const Matrix&, const Matrix&, const Matrix&,
                           Matrix&) override {
    return absl::UnimplementedError("records contexts only");
  }
  absl::Status Reset() override { return absl::OkStatus(); }

  std::vector<Matrix> keys, values;  // one per layer
};

std::vector<Token> Tokens(absl::string_view text) { return {text.begin(), text.end()}; }

double NegativeLogLikelihood(const RowVector& logits, Token token) {
  const float top = logits.maxCoeff();
  const double sum = (logits.array() - top).cast<double>().exp().sum();
  return std::log(sum) - (logits(token) - top);
}

std::vector<float> ScalesOf(const Matrix& held, const ModelConfig& config, float largest) {
  std::vector<float> scales;
  for (int64_t head = 0; head < config.kv_heads; ++head) {
    const float top =
        held.middleCols(head * config.head_dim, config.head_dim).cwiseAbs().maxCoeff();
    scales.push_back(top > 0 ? kHeadroom * top / largest : 1.0f);
  }
  return scales;
}

}  // namespace

absl::StatusOr<Evaluation> Evaluate(const Model& model, const std::vector<std::string>& windows,
                                    int64_t chunk, Attention& attention) {
  if (chunk < 1) return absl::InvalidArgumentError("chunk must be >= 1");
  Evaluation evaluation;
  double loss = 0;
  for (const std::string& window : windows) {
    const std::vector<Token> tokens = Tokens(window);
    if (absl::Status reset = attention.Reset(); !reset.ok()) return reset;
    const int64_t scored = static_cast<int64_t>(tokens.size()) - 1;
    for (int64_t begin = 0; begin < scored; begin += chunk) {
      const int64_t rows = std::min(chunk, scored - begin);
      const absl::StatusOr<Matrix> logits =
          model.Forward(std::span(tokens).subspan(begin, rows), begin, attention);
      if (!logits.ok()) return logits.status();
      for (int64_t row = 0; row < rows; ++row) {
        const RowVector of_row = logits->row(row);
        Eigen::Index best = 0;
        of_row.maxCoeff(&best);
        evaluation.greedy.push_back(static_cast<Token>(best));
        loss += NegativeLogLikelihood(of_row, tokens[begin + row + 1]);
      }
    }
  }
  if (evaluation.greedy.empty()) return absl::InvalidArgumentError("there is nothing to score");
  evaluation.perplexity = std::exp(loss / static_cast<double>(evaluation.greedy.size()));
  return evaluation;
}

double GreedyAgreement(const Evaluation& a, const Evaluation& b) {
  const size_t count = std::min(a.greedy.size(), b.greedy.size());
  if (count == 0) return 0;
  size_t same = 0;
  for (size_t i = 0; i < count; ++i) same += a.greedy[i] == b.greedy[i];
  return static_cast<double>(same) / static_cast<double>(count);
}

std::vector<std::string> Windows(absl::string_view text, int64_t count, int64_t size) {
  const int64_t fitting = std::min<int64_t>(count, static_cast<int64_t>(text.size()) / size);
  std::vector<std::string> windows;
  for (int64_t i = 0; i < fitting; ++i) {
    const int64_t slack = static_cast<int64_t>(text.size()) - size;
    const int64_t begin = fitting == 1 ? 0 : i * slack / (fitting - 1);
    windows.emplace_back(text.substr(begin, size));
  }
  return windows;
}

absl::StatusOr<std::vector<LayerScales>> CalibrateScales(const Model& model, absl::string_view text,
                                                         DType kv_dtype) {
  if (IsUnscaled(kv_dtype)) return std::vector<LayerScales>{};
  const float largest = Largest(kv_dtype);
  LocalAttention attention(model.config());
  const std::vector<Token> tokens = Tokens(text.substr(0, model.config().max_positions));
  if (const auto logits = model.Forward(tokens, 0, attention); !logits.ok()) return logits.status();
  std::vector<LayerScales> scales;
  scales.reserve(model.config().layers);
  for (int32_t layer = 0; layer < model.config().layers; ++layer) {
    scales.push_back({.k = ScalesOf(attention.keys(layer), model.config(), largest),
                      .v = ScalesOf(attention.values(layer), model.config(), largest)});
  }
  return scales;
}

absl::StatusOr<std::vector<LayerScales>> CalibrateDraftScales(const Model& model,
                                                              const Draft& draft,
                                                              absl::string_view text,
                                                              DType kv_dtype) {
  if (IsUnscaled(kv_dtype)) return std::vector<LayerScales>{};
  LocalAttention attention(model.config());
  StateTap tap{.layers = draft.config().target_layers, .states = {}};
  const std::vector<Token> tokens = Tokens(text.substr(0, model.config().max_positions));
  const auto logits = model.Forward(tokens, 0, attention, &tap);
  if (!logits.ok()) return logits.status();
  ContextRecorder context;
  if (absl::Status status = draft.Extend(0, tap.states, context); !status.ok()) return status;
  std::vector<LayerScales> scales;
  for (size_t layer = 0; layer < context.keys.size(); ++layer) {
    scales.push_back(
        {.k = ScalesOf(context.keys[layer], draft.config().shape, Largest(kv_dtype)),
         .v = ScalesOf(context.values[layer], draft.config().shape, Largest(kv_dtype))});
  }
  return scales;
}

}  // namespace tributary::tinylm
