// What the prefill kernels take, as one plain struct of device pointers and sizes.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// All pointers are device pointers. Queries, keys and values have the types computed in.
struct PrefillKernelArgs {
  const PrefillItem* items = nullptr;
  int32_t item_begin = 0;  // of the pass
  const RowKeys* keys = nullptr;
  const void* q = nullptr;         // [rows, q_heads, head_dim]
  const float* q_scale = nullptr;  // [rows, q_heads] or nullptr for ones: real = stored * scale
  const void* k = nullptr;         // [tokens, kv_heads, head_dim]
  const void* v = nullptr;         // [tokens, kv_heads, head_dim]
  int32_t rows = 0;
  int32_t tokens = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_begin = 0;
  int32_t head_count = 0;
  const float* k_scale = nullptr;  // [kv_heads] or nullptr for ones
  const float* v_scale = nullptr;  // [kv_heads] or nullptr for ones
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  DType o_dtype = DType::kF32;
  void* o = nullptr;     // [rows, head_count, head_dim]
  float* lse = nullptr;  // [rows, head_count]
  // Partials of rows [partial_row_begin, partial_row_begin + partial_rows) split over keys.
  float* partial_o = nullptr;    // [splits, partial_rows, head_count, head_dim]
  float* partial_lse = nullptr;  // [splits, partial_rows, head_count]
  int32_t partial_row_begin = 0;
  int32_t partial_rows = 0;

  TRIBUTARY_HOST_DEVICE int KvHead(int head) const { return head / (q_heads / kv_heads); }
};

}  // namespace tributary::cuda
