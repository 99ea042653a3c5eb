#include "examples/tinylm/transformer_ops.h"

#include <cmath>

namespace tributary::tinylm {
namespace {

constexpr int kLanes = 8;
using Lanes = Eigen::Array<float, kLanes, 1>;

// Products of kRows rows of x with a row of w. Every row goes through the same operations in the
// same order, whatever kRows is; w is read once for all of them.
template <int kRows>
void DotRows(const float* x, int64_t x_stride, const float* w, int64_t size, float* out,
             int64_t out_stride) {
  Lanes sums[kRows];
  for (Lanes& sum : sums) sum.setZero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Lanes weights = Eigen::Map<const Lanes>(w + i);
    for (int row = 0; row < kRows; ++row) {
      sums[row] += weights * Eigen::Map<const Lanes>(x + row * x_stride + i);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    float sum = sums[row].sum();
    for (int64_t j = i; j < size; ++j) sum += w[j] * x[row * x_stride + j];
    out[row * out_stride] = sum;
  }
}

template <int kRows>
void ProjectRows(const Matrix& x, int64_t first, const Matrix& w, Matrix& out) {
  for (int64_t n = 0; n < w.rows(); ++n) {
    DotRows<kRows>(x.row(first).data(), x.cols(), w.row(n).data(), x.cols(), &out(first, n),
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

}  // namespace tributary::tinylm
