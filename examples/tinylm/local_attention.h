// Attention in this process, in fp32, over a cache held whole: what the service is compared with.
#pragma once

#include <vector>

#include "examples/tinylm/attention.h"
#include "kernels/dtype.h"

namespace tributary::tinylm {

struct LocalAttentionOptions {
  // What K/V are rounded to when they are kept. kF32: nothing is rounded.
  DType kv_dtype = DType::kF32;
  // Calls with more rows than this see their own tokens unrounded, as a service does whose prefill
  // attends over new tokens in full precision.
  int32_t rounded_rows = 64;
};

class LocalAttention final : public Attention {
 public:
  explicit LocalAttention(const ModelConfig& config, const LocalAttentionOptions& options = {});

  absl::Status Attend(int32_t layer, int64_t first_position, const Matrix& q, const Matrix& k,
                      const Matrix& v, Matrix& out) override;
  absl::Status Truncate(int64_t length) override;

  // What is held of a layer: [max_positions, kv_heads * head_dim].
  const Matrix& keys(int32_t layer) const { return layers_[layer].keys; }
  const Matrix& values(int32_t layer) const { return layers_[layer].values; }

 private:
  struct Layer {
    int64_t length = 0;
    Matrix keys;
    Matrix values;
  };

  const ModelConfig config_;
  const LocalAttentionOptions options_;
  std::vector<Layer> layers_;
};

}  // namespace tributary::tinylm
