// The attention that everything else is compared with, itself compared with double precision.
#include <gtest/gtest.h>

#include <cmath>

#include "examples/tinylm/local_attention.h"
#include "kernels/half.h"

namespace tributary::tinylm {
namespace {

ModelConfig SmallConfig() {
  ModelConfig config;
  config.layers = 1;
  config.q_heads = 6;
  config.kv_heads = 2;
  config.head_dim = 8;
  config.max_positions = 16;
  return config;
}

// Row `row` of head `head` over the first row + 1 keys, the definition in double precision.
Eigen::RowVectorXd DenseAttention(const ModelConfig& c, const Matrix& q, const Matrix& k,
                                  const Matrix& v, int64_t row, int64_t head) {
  const int64_t kv = head / (c.q_heads / c.kv_heads) * c.head_dim;
  Eigen::RowVectorXd out = Eigen::RowVectorXd::Zero(c.head_dim);
  double sum = 0;
  for (int64_t key = 0; key <= row; ++key) {
    double logit = 0;
    for (int64_t i = 0; i < c.head_dim; ++i) {
      logit += double{q(row, head * c.head_dim + i)} * k(key, kv + i);
    }
    const double weight = std::exp(logit / std::sqrt(double{1} * c.head_dim));
    sum += weight;
    out += weight * v.row(key).segment(kv, c.head_dim).cast<double>();
  }
  return out / sum;
}

Matrix RoundedToBf16(const Matrix& x) {
  return x.unaryExpr([](float f) { return FloatFromBf16(Bf16FromFloat(f)); });
}

// Calls of `chunk` rows over 13 tokens; the cache rounds to `kv_dtype`.
void ExpectDenseAttention(int64_t chunk, DType kv_dtype) {
  const ModelConfig c = SmallConfig();
  constexpr int64_t kTokens = 13;
  std::srand(1);  // Eigen's Random draws from it
  const Matrix q = Matrix::Random(kTokens, c.q_heads * c.head_dim);
  const Matrix k = Matrix::Random(kTokens, c.kv_heads * c.head_dim);
  const Matrix v = Matrix::Random(kTokens, c.kv_heads * c.head_dim);
  LocalAttention attention(c, {.kv_dtype = kv_dtype});
  Matrix out(kTokens, q.cols());
  for (int64_t begin = 0; begin < kTokens; begin += chunk) {
    const int64_t rows = std::min(chunk, kTokens - begin);
    Matrix part(rows, q.cols());
    ASSERT_TRUE(attention
                    .Attend(0, begin, q.middleRows(begin, rows), k.middleRows(begin, rows),
                            v.middleRows(begin, rows), part)
                    .ok());
    out.middleRows(begin, rows) = part;
  }
  const bool rounded = kv_dtype == DType::kBf16;
  const Matrix keys = rounded ? RoundedToBf16(k) : k;
  const Matrix values = rounded ? RoundedToBf16(v) : v;
  for (int64_t row = 0; row < kTokens; ++row) {
    for (int64_t head = 0; head < c.q_heads; ++head) {
      const Eigen::RowVectorXd expected = DenseAttention(c, q, keys, values, row, head);
      const Eigen::RowVectorXd actual =
          out.row(row).segment(head * c.head_dim, c.head_dim).cast<double>();
      EXPECT_LT((actual - expected).cwiseAbs().maxCoeff(), 1e-6)
          << "row " << row << " head " << head;
    }
  }
}

TEST(LocalAttention, MatchesTheDefinition) {
  for (const int64_t chunk : {1, 5, 13}) ExpectDenseAttention(chunk, DType::kF32);
}

TEST(LocalAttention, RoundsWhatItKeeps) {
  for (const int64_t chunk : {1, 5, 13}) ExpectDenseAttention(chunk, DType::kBf16);
}

TEST(LocalAttention, RefusesGapsAndRepeats) {
  const ModelConfig c = SmallConfig();
  LocalAttention attention(c);
  const Matrix q = Matrix::Zero(2, c.q_heads * c.head_dim);
  const Matrix kv = Matrix::Zero(2, c.kv_heads * c.head_dim);
  Matrix out(2, q.cols());
  EXPECT_EQ(attention.Attend(0, 1, q, kv, kv, out).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(attention.Attend(0, 0, q, kv, kv, out).ok());
  EXPECT_EQ(attention.Attend(0, 0, q, kv, kv, out).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(attention.Reset().ok());
  EXPECT_TRUE(attention.Attend(0, 0, q, kv, kv, out).ok());
}

}  // namespace
}  // namespace tributary::tinylm
