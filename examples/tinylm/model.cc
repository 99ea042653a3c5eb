#include "examples/tinylm/model.h"

#include <utility>

#include "absl/strings/str_cat.h"
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
    const Matrix normed = RmsNorm(x, w.input_norm, c.rms_norm_eps);
    Matrix q = Project(normed, w.q_proj);
    Matrix k = Project(normed, w.k_proj);
    const Matrix v = Project(normed, w.v_proj);
    rope_.Rotate(first_position, c.q_heads, q);
    rope_.Rotate(first_position, c.kv_heads, k);
    const absl::Status status = attention.Attend(layer, first_position, q, k, v, attended);
    if (!status.ok()) return status;
    x += Project(attended, w.o_proj);
    x += SwiGlu(RmsNorm(x, w.post_attention_norm, c.rms_norm_eps), w);
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
