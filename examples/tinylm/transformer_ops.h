// What the target and the draft are both made of, in fp32.
#pragma once

#include <cstdint>

#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

Matrix RmsNorm(const Matrix& x, const RowVector& gain, float eps);

Matrix SwiGlu(const Matrix& x, const LayerWeights& w);

// RoPE, rotate-half convention: channel i of a head is paired with channel i + head_dim / 2.
class Rope {
 public:
  explicit Rope(const ModelConfig& config);

  // Rotates the heads of rows at positions first_position and on.
  void Rotate(int64_t first_position, int32_t heads, Matrix& x) const;

 private:
  Matrix cos_;  // [max_positions, head_dim / 2]
  Matrix sin_;
};

// The queries, keys and values of a layer's rows.
struct Projections {
  Matrix q;  // rotated
  Matrix k;  // rotated
  Matrix v;
};

// What a decoder layer does around its attention: before it, for rows x at positions first_position
// and on ...
Projections ProjectForAttention(const Matrix& x, int64_t first_position, const ModelConfig& c,
                                const LayerWeights& w, const Rope& rope);
// ... and after it, in place.
void FinishLayer(const Matrix& attended, const ModelConfig& c, const LayerWeights& w, Matrix& x);

}  // namespace tributary::tinylm
