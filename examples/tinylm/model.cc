#include "examples/tinylm/model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/tinylm/project.h"
#include "examples/tinylm/transformer_ops.h"

namespace tributary::tinylm {

Model::Model(Weights weights) : weights_(std::move(weights)), rope_(weights_.config) {}

absl::StatusOr<Matrix> Model::Forward(std::span<const Token> tokens, int64_t first_position,
                                      Attention& attention, StateTap* tap) const {
  const ModelConfig& c = config();
  const int64_t rows = static_cast<int64_t>(tokens.size());
  if (first_position < 0 || first_position + rows > c.max_positions) {
    return absl::OutOfRangeError(absl::StrCat("tokens up to position ", first_position + rows,
                                              "; the model was trained on ", c.max_positions));
  }
  Matrix x(rows, c.hidden_size);
  for (int64_t row = 0; row < rows; ++row) x.row(row) = weights_.embedding.row(tokens[row]);

  if (tap != nullptr) {
    tap->states.resize(rows, static_cast<int64_t>(tap->layers.size()) * c.hidden_size);
  }
  Matrix attended(rows, int64_t{c.q_heads} * c.head_dim);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    const Projections p = ProjectForAttention(x, first_position, c, w, rope_);
    const absl::Status status = attention.Attend(layer, first_position, p.q, p.k, p.v, attended);
    if (!status.ok()) return status;
    FinishLayer(attended, c, w, x);
    if (tap != nullptr) tap->Take(layer, x);
  }
  const Matrix last = RmsNorm(x, weights_.norm, c.rms_norm_eps);
  return Project(last, head());
}

void StateTap::Take(int32_t layer, const Matrix& x) {
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == layer) states.middleCols(static_cast<int64_t>(i) * x.cols(), x.cols()) = x;
  }
}

}  // namespace tributary::tinylm
