#include "examples/tinylm/model.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary::tinylm {
namespace {

Matrix RmsNorm(const Matrix& x, const RowVector& gain, float eps) {
  const Eigen::VectorXf scale =
      (x.rowwise().squaredNorm().array() / static_cast<float>(x.cols()) + eps).rsqrt();
  return ((x.array().colwise() * scale.array()).rowwise() * gain.array()).matrix();
}

// x W^T. One row is a matrix-vector product: Eigen runs that at memory speed, but only when it is
// told so.
Matrix Project(const Matrix& x, const Matrix& w) {
  Matrix out(x.rows(), w.rows());
  if (x.rows() == 1) {
    out.row(0).transpose().noalias() = w * x.row(0).transpose();
  } else {
    out.noalias() = x * w.transpose();
  }
  return out;
}

Matrix SwiGlu(const Matrix& x, const LayerWeights& w) {
  const Matrix gate = Project(x, w.gate_proj);
  Matrix inner = Project(x, w.up_proj);
  inner.array() *= gate.array() / (1.0f + (-gate.array()).exp());
  return Project(inner, w.down_proj);
}

}  // namespace

Model::Model(Weights weights) : weights_(std::move(weights)) {
  const int32_t half = config().head_dim / 2;
  cos_.resize(config().max_positions, half);
  sin_.resize(config().max_positions, half);
  for (int32_t i = 0; i < half; ++i) {
    const double frequency = std::pow(double{config().rope_theta}, -2.0 * i / config().head_dim);
    for (int32_t position = 0; position < config().max_positions; ++position) {
      cos_(position, i) = static_cast<float>(std::cos(position * frequency));
      sin_(position, i) = static_cast<float>(std::sin(position * frequency));
    }
  }
}

// RoPE, rotate-half convention: channel i of a head is paired with channel i + head_dim / 2.
void Model::Rotate(int64_t first_position, int32_t heads, Matrix& x) const {
  const int64_t half = config().head_dim / 2;
  const auto cos = cos_.middleRows(first_position, x.rows()).array();
  const auto sin = sin_.middleRows(first_position, x.rows()).array();
  for (int32_t head = 0; head < heads; ++head) {
    auto low = x.middleCols(head * 2 * half, half).array();
    auto high = x.middleCols(head * 2 * half + half, half).array();
    const Matrix rotated = low * cos - high * sin;
    high = high * cos + low * sin;
    low = rotated;
  }
}

absl::StatusOr<Matrix> Model::Forward(std::span<const Token> tokens, int64_t first_position,
                                      Attention& attention) const {
  const ModelConfig& c = config();
  const int64_t rows = static_cast<int64_t>(tokens.size());
  if (first_position < 0 || first_position + rows > c.max_positions) {
    return absl::OutOfRangeError(absl::StrCat("tokens up to position ", first_position + rows,
                                              "; the model was trained on ", c.max_positions));
  }
  Matrix x(rows, c.hidden_size);
  for (int64_t row = 0; row < rows; ++row) x.row(row) = weights_.embedding.row(tokens[row]);

  Matrix attended(rows, int64_t{c.q_heads} * c.head_dim);
  for (int32_t layer = 0; layer < c.layers; ++layer) {
    const LayerWeights& w = weights_.layers[layer];
    const Matrix normed = RmsNorm(x, w.input_norm, c.rms_norm_eps);
    Matrix q = Project(normed, w.q_proj);
    Matrix k = Project(normed, w.k_proj);
    const Matrix v = Project(normed, w.v_proj);
    Rotate(first_position, c.q_heads, q);
    Rotate(first_position, c.kv_heads, k);
    const absl::Status status = attention.Attend(layer, first_position, q, k, v, attended);
    if (!status.ok()) return status;
    x += Project(attended, w.o_proj);
    x += SwiGlu(RmsNorm(x, w.post_attention_norm, c.rms_norm_eps), w);
  }
  const Matrix last = RmsNorm(x, weights_.norm, c.rms_norm_eps);
  return Project(last, c.tied_embeddings ? weights_.embedding : weights_.lm_head);
}

}  // namespace tributary::tinylm
