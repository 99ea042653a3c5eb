// Where a model's attention is computed: here, or by the service.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "examples/tinylm/weights.h"

namespace tributary::tinylm {

// The attention of one sequence, with its KV cache. Layers are called in order, each with the rows
// that follow those it has seen.
class Attention {
 public:
  virtual ~Attention() = default;

  // Keeps k and v of tokens [first_position, first_position + rows) and attends causally: row i
  // sees keys [0, first_position + i]. Logits are q.k / sqrt(head_dim).
  //   q, out: [rows, q_heads * head_dim]; k, v: [rows, kv_heads * head_dim]. Positions are already
  //   in q and k (RoPE).
  virtual absl::Status Attend(int32_t layer, int64_t first_position, const Matrix& q,
                              const Matrix& k, const Matrix& v, Matrix& out) = 0;

  // Forgets the tokens from `length` on: the next ones start there.
  virtual absl::Status Truncate(int64_t length) = 0;
  absl::Status Reset() { return Truncate(0); }
};

}  // namespace tributary::tinylm
