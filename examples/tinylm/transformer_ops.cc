#include "examples/tinylm/transformer_ops.h"

#include <cmath>

#include "examples/tinylm/project.h"

namespace tributary::tinylm {

Matrix RmsNorm(const Matrix& x, const RowVector& gain, float eps) {
  Matrix out(x.rows(), x.cols());
  for (int64_t row = 0; row < x.rows(); ++row) {  // one by one: sums in the same order for each
    const float mean = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    out.row(row) = (x.row(row).array() * (1.0f / std::sqrt(mean + eps)) * gain.array()).matrix();
  }
  return out;
}

Matrix SwiGlu(const Matrix& x, const LayerWeights& w) {
  const Matrix gate = Project(x, w.gate_proj);
  Matrix inner = Project(x, w.up_proj);
  for (int64_t i = 0; i < inner.size(); ++i) {
    inner.data()[i] *= gate.data()[i] / (1.0f + std::exp(-gate.data()[i]));
  }
  return Project(inner, w.down_proj);
}

Rope::Rope(const ModelConfig& config) {
  const int32_t half = config.head_dim / 2;
  cos_.resize(config.max_positions, half);
  sin_.resize(config.max_positions, half);
  for (int32_t i = 0; i < half; ++i) {
    const double frequency = std::pow(double{config.rope_theta}, -2.0 * i / config.head_dim);
    for (int32_t position = 0; position < config.max_positions; ++position) {
      cos_(position, i) = static_cast<float>(std::cos(position * frequency));
      sin_(position, i) = static_cast<float>(std::sin(position * frequency));
    }
  }
}

void Rope::Rotate(int64_t first_position, int32_t heads, Matrix& x) const {
  const int64_t half = cos_.cols();
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

Projections ProjectForAttention(const Matrix& x, int64_t first_position, const ModelConfig& c,
                                const LayerWeights& w, const Rope& rope) {
  const Matrix normed = RmsNorm(x, w.input_norm, c.rms_norm_eps);
  Projections p{Project(normed, w.q_proj), Project(normed, w.k_proj), Project(normed, w.v_proj)};
  rope.Rotate(first_position, c.q_heads, p.q);
  rope.Rotate(first_position, c.kv_heads, p.k);
  return p;
}

void FinishLayer(const Matrix& attended, const ModelConfig& c, const LayerWeights& w, Matrix& x) {
  x += Project(attended, w.o_proj);
  x += SwiGlu(RmsNorm(x, w.post_attention_norm, c.rms_norm_eps), w);
}

}  // namespace tributary::tinylm
