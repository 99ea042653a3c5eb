// What every prefill kernel takes: one plain struct of device pointers and sizes.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// All pointers are device pointers. prefill.cc fills it in for every pass; queries, keys and values
// already have the types that the kernel multiplies.
struct PrefillKernelArgs {
  const PrefillItem* items = nullptr;
  int32_t item_begin = 0;  // the first item of the pass
  const RowKeys* keys = nullptr;
  const void* q = nullptr;         // [rows, q_heads, key_dim]
  const float* q_scale = nullptr;  // [rows, q_heads] or nullptr for ones: real = stored * scale
  const void* k = nullptr;         // [tokens, kv_heads, key_dim]
  const void* v = nullptr;         // [tokens, kv_heads, value_dim]
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
  void* o = nullptr;     // [rows, head_count, value_dim]
  float* lse = nullptr;  // [rows, head_count]
  // The partials of rows [partial_row_begin, partial_row_begin + partial_rows), which are split
  // over keys.
  float* partial_o = nullptr;    // [splits, partial_rows, head_count, value_dim]
  float* partial_lse = nullptr;  // [splits, partial_rows, head_count]
  int32_t partial_row_begin = 0;
  int32_t partial_rows = 0;

  // The KV head that a query head attends over.
  TRIBUTARY_HOST_DEVICE int KvHead(int head) const { return head / (q_heads / kv_heads); }
};

}  // namespace tributary::cuda
