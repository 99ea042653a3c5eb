// The calls that attention_grid times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kv_geometry.h"

namespace tributary::cuda {

// One call over sequences of these lengths, in tokens.
struct Case {
  std::string name;
  std::vector<int64_t> lengths;
  KvGeometry kv = SquareGeometry(/*kv_heads=*/4, /*head_dim=*/128, DType::kFp8E4M3);
  int32_t q_heads = 32;
  int32_t page_size = 16;
  int32_t rows = 1;
  int64_t window = -1;
  bool causal = true;
};

// The cases of a set: field, shapes, dims, spread, batches, drafts, grid, or all of them. Empty for
// another name.
std::vector<Case> CasesOf(const std::string& set);

}  // namespace tributary::cuda
