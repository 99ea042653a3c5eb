#include "examples/tinylm/transformer_ops.h"

#include <cmath>

namespace tributary::tinylm {
namespace {

using Lanes = Eigen::Array4f;

// Products of kRows rows of x with kOutputs rows of w. Each product goes through the same
// operations in the same order, whatever else is in the block; each element read serves the whole
// block.
template <int kRows, int kOutputs>
void DotBlock(const float* x, int64_t x_stride, const float* w, int64_t size, float* out,
              int64_t out_stride) {
  Lanes sums[kRows][kOutputs];
  for (auto& of_row : sums) {
    for (Lanes& sum : of_row) sum.setZero();
  }
  int64_t i = 0;
  for (; i + Lanes::SizeAtCompileTime <= size; i += Lanes::SizeAtCompileTime) {
    Lanes inputs[kRows];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) inputs[row] = Lanes::Map(x + row * x_stride + i);
#pragma GCC unroll 4
    for (int output = 0; output < kOutputs; ++output) {
      const Lanes weights = Lanes::Map(w + output * size + i);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) sums[row][output] += weights * inputs[row];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int output = 0; output < kOutputs; ++output) {
      float sum = sums[row][output].sum();
      for (int64_t j = i; j < size; ++j) sum += w[output * size + j] * x[row * x_stride + j];
      out[row * out_stride + output] = sum;
    }
  }
}

// kRows rows of x from `first` on, with all rows of w.
template <int kRows>
void ProjectRows(const Matrix& x, int64_t first, const Matrix& w, Matrix& out) {
  constexpr int kOutputs = kRows == 1 ? 4 : 2;
  const float* rows = x.data() + first * x.cols();
  int64_t n = 0;
  for (; n + kOutputs <= w.rows(); n += kOutputs) {
    DotBlock<kRows, kOutputs>(rows, x.cols(), w.data() + n * w.cols(), w.cols(), &out(first, n),
                              out.cols());
  }
  for (; n < w.rows(); ++n) {
    DotBlock<kRows, 1>(rows, x.cols(), w.data() + n * w.cols(), w.cols(), &out(first, n),
                       out.cols());
  }
}

}  // namespace

Matrix RmsNorm(const Matrix& x, const RowVector& gain, float eps) {
  Matrix out(x.rows(), x.cols());
  for (int64_t row = 0; row < x.rows(); ++row) {  // one by one: sums in the same order for each
    const float mean = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    out.row(row) = (x.row(row).array() * (1.0f / std::sqrt(mean + eps)) * gain.array()).matrix();
  }
  return out;
}

Matrix Project(const Matrix& x, const Matrix& w) {
  Matrix out(x.rows(), w.rows());
  if (x.rows() > kInvariantRows) {
    out.noalias() = x * w.transpose();
    return out;
  }
  int64_t row = 0;
  for (; row + 4 <= x.rows(); row += 4) ProjectRows<4>(x, row, w, out);
  for (; row < x.rows(); ++row) ProjectRows<1>(x, row, w, out);
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
