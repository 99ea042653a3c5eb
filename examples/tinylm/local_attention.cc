#include "examples/tinylm/local_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/element.h"

namespace tributary::tinylm {
namespace {

template <typename Block>
void RoundTo(DType type, Block block) {
  if (type == DType::kF32) return;
  for (int64_t row = 0; row < block.rows(); ++row) {
    for (int64_t column = 0; column < block.cols(); ++column) {
      uint32_t stored = 0;
      StoreElement(type, &stored, 0, block(row, column));
      block(row, column) = LoadElement(type, &stored, 0);
    }
  }
}

// Row i sees keys [0, first + i].
void CausalSoftmax(int64_t first, Matrix& logits) {
  for (int64_t row = 0; row < logits.rows(); ++row) {
    const int64_t seen = first + row + 1;
    auto visible = logits.row(row).head(seen).array();
    visible = (visible - visible.maxCoeff()).exp();
    visible /= visible.sum();
    logits.row(row).tail(logits.cols() - seen).setZero();
  }
}

}  // namespace

LocalAttention::LocalAttention(const ModelConfig& config, const LocalAttentionOptions& options)
    : config_(config), options_(options), layers_(config.layers) {
  for (Layer& layer : layers_) {
    const int64_t columns = int64_t{config.kv_heads} * config.head_dim;
    layer.keys.setZero(config.max_positions, columns);
    layer.values.setZero(config.max_positions, columns);
  }
}

absl::Status LocalAttention::Attend(int32_t layer, int64_t first_position, const Matrix& q,
                                    const Matrix& k, const Matrix& v, Matrix& out) {
  Layer& held = layers_[layer];
  const int64_t rows = q.rows();
  const int64_t length = first_position + rows;
  if (first_position != held.length || length > held.keys.rows()) {
    return absl::OutOfRangeError(absl::StrCat("position ", first_position, " with ", held.length,
                                              " tokens held of ", held.keys.rows()));
  }
  auto new_keys = held.keys.middleRows(first_position, rows);
  auto new_values = held.values.middleRows(first_position, rows);
  new_keys = k;
  new_values = v;
  const bool round_first = rows <= options_.rounded_rows;
  if (round_first) {
    RoundTo(options_.kv_dtype, new_keys);
    RoundTo(options_.kv_dtype, new_values);
  }

  const int64_t d = config_.head_dim;
  const int64_t group = config_.q_heads / config_.kv_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  Matrix logits(rows, length);
  for (int64_t head = 0; head < config_.q_heads; ++head) {
    const auto keys = held.keys.block(0, head / group * d, length, d);
    const auto values = held.values.block(0, head / group * d, length, d);
    logits.noalias() = scale * q.middleCols(head * d, d) * keys.transpose();
    CausalSoftmax(first_position, logits);
    out.middleCols(head * d, d).noalias() = logits * values;
  }

  if (!round_first) {
    RoundTo(options_.kv_dtype, new_keys);
    RoundTo(options_.kv_dtype, new_values);
  }
  held.length = length;
  return absl::OkStatus();
}

absl::Status LocalAttention::Truncate(int64_t length) {
  for (Layer& layer : layers_) layer.length = std::min(layer.length, length);
  return absl::OkStatus();
}

}  // namespace tributary::tinylm
