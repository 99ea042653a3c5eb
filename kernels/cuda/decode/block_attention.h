// A draft's block: rows that attend over the few new tokens they came with, in full precision, and
// merge what that gives with the partial of the context, in place, in one launch.
//
// Rows and tokens are few, so the launch is nearly all latency. Therefore everything but the merge
// is done while the launch ahead, which makes the context's partial, is still running.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/plan/work_item.h"  // RowKeys
#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::cuda {

// Rows of one sequence, and all the tokens of its block.
struct BlockEntry {
  int32_t row_begin = 0;  // of the call
  int32_t row_count = 0;
  int32_t token_begin = 0;  // of k and v
  int32_t token_count = 0;
};

// All pointers are device pointers, aligned to 16 bytes.
struct BlockArgs {
  const BlockEntry* entries = nullptr;  // [entry_count], no row in two of them
  int32_t entry_count = 0;
  int32_t most_rows = 0;          // of an entry
  const RowKeys* keys = nullptr;  // [rows], tokens of k and v, those of the entry
  const void* q = nullptr;        // [rows, q_heads, key_dim] of q_dtype
  DType q_dtype = DType::kBf16;   // f32, bf16 or f16
  const void* k = nullptr;        // [tokens, kv_heads, key_dim] of kv_dtype
  const void* v = nullptr;        // [tokens, kv_heads, value_dim] of kv_dtype
  DType kv_dtype = DType::kBf16;  // f32, bf16 or f16; products are of f16 when it is that, of bf16
                                  // otherwise
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t key_dim = 0;  // a row of kernels/head_dims.h
  int32_t value_dim = 0;
  int32_t head_begin = 0;  // the query heads to compute
  int32_t head_count = 0;
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;         // > 0: logits = soft_cap * tanh(logits / soft_cap)
  const float* sinks = nullptr;  // [head_count], applied after the merge; nullptr for none
  float* o = nullptr;            // [rows, q_heads, value_dim], merged in place
  float* lse = nullptr;          // [rows, q_heads], natural log, without sinks; merged in place
  // q, k, v, entries and keys were complete before the launch ahead began: all but the merge is
  // done beside it. sm_90.
  bool begins_early = false;
};

Status LaunchBlockAttention(const BlockArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
