// The calls that attention_grid times.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kv_geometry.h"

namespace tributary::cuda {

// Tokens that the sequences of a group have in common, behind those that larger groups have. A
// level's groups are equally large, and of neighbouring sequences.
struct SharedLevel {
  int64_t tokens = 0;
  int32_t groups = 1;
};

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
  std::vector<SharedLevel> shared;  // larger groups first
};

// The cases of a set: field, shapes, dims, spread, wide, batches, drafts, cascade, grid, or all of
// them. Empty for another name.
std::vector<Case> CasesOf(const std::string& set);

}  // namespace tributary::cuda
