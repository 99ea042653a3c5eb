// Prefill on one GPU: attention of many query rows (more than 64 a sequence; fewer work, too), over
// context in the paged cache or over the new tokens themselves.
//
//   const PrefillChoice choice = ChoosePrefill(device, shape);          // once a cache
//   const PrefillPlanShape plan_shape = PrefillPlanShapeFor(choice, shape, device,
//   workspace_slots); PlanPrefillContext(plan_shape, entries, keys, &plan);               // once a
//   step, or PlanPrefillNewTokens(plan_shape, entries, keys, &plan);
//   ... copy plan.items, plan.keys and plan.gathers to the device ...
//   LaunchPrefill(choice, shape, plan.passes, args, stream);            // once a layer
//
// The two parts of a prefill are two such calls; with `accumulate` in the plan's shape the second
// merges its result with the first's, in place. A launch allocates nothing, waits for nothing and
// reads nothing back, so it can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <string>

#include "kernels/cuda/decode/attention.h"
#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/dtype.h"
#include "kernels/kv_geometry.h"
#include "kernels/status.h"

namespace tributary::cuda {

struct PrefillShape {
  DType q = DType::kBf16;  // f32, bf16 or f16
  // Of the cache: any of its types. Of new tokens: bf16 or f16. A row of kernels/head_dims.h.
  KvGeometry geometry;
  int32_t q_heads = 0;     // kv_heads times 1 to kMaxGqaRatio
  int32_t page_size = 0;   // of the cache: 16, 32, 64 or 128; 0 for new tokens
  int32_t head_begin = 0;  // the query heads to compute
  int32_t head_count = 0;
};

struct PrefillOptions {
  bool portable = false;  // leaves out what only one architecture has
  // Over an FP8 cache: queries are rounded to e4m3, too, with a scale a row and head. On sm_90a
  // they are multiplied with the keys as they are, which is faster.
  bool fp8_queries = false;
};

enum class PrefillKind {
  kMma,    // sm_80 and later
  kWgmma,  // sm_90a
};

struct PrefillChoice {
  PrefillKind kind = PrefillKind::kMma;
  DType compute = DType::kBf16;  // of products: bf16 or f16
  bool fp8_queries = false;      // queries are rounded to FP8
  int32_t rows_per_tile = 64;
  int32_t keys_per_tile = 64;
};
std::string ToString(const PrefillChoice& choice);

// Pure functions of their arguments. Products are computed in the type of K and V when that has 16
// bits; FP8 is exact in either, so the queries decide.
PrefillChoice ChoosePrefill(const DeviceProperties& device, const PrefillShape& shape,
                            const PrefillOptions& options = {});
PrefillPlanShape PrefillPlanShapeFor(const PrefillChoice& choice, const PrefillShape& shape,
                                     const DeviceProperties& device, int64_t workspace_slots = 0);

// What the workspace of a call must hold, in bytes: converted queries when their type is not the
// one computed in, and for context `workspace_slots` gathered slots and the partials of rows split
// over keys.
size_t PrefillWorkspaceBytes(const PrefillChoice& choice, const PrefillShape& shape, int64_t rows,
                             int64_t workspace_slots);

// All pointers are device pointers.
struct PrefillArgs {
  const PrefillItem* items = nullptr;      // the plan's
  const PrefillGather* gathers = nullptr;  // the plan's
  const RowKeys* keys = nullptr;           // the plan's, [rows]
  int32_t rows = 0;
  const void* q = nullptr;  // [rows, q_heads, head_dim], aligned to 16 bytes
  // New tokens.
  const void* k = nullptr;  // [tokens, kv_heads, head_dim], aligned to 16 bytes
  const void* v = nullptr;  // [tokens, kv_heads, head_dim], aligned to 16 bytes
  int32_t tokens = 0;
  // Context.
  const int32_t* page_tables = nullptr;
  const std::byte* cache = nullptr;  // [num_pages, 2, kv_heads, plane]; see page_layout.h
  const float* k_scale = nullptr;    // [kv_heads] or nullptr for ones
  const float* v_scale = nullptr;    // [kv_heads] or nullptr for ones

  float sm_scale = 1.0f;
  float soft_cap = 0.0f;  // > 0: logits = soft_cap * tanh(logits / soft_cap)
  // f32, or bf16 or f16 for a plan of one pass that does not accumulate.
  DType o_dtype = DType::kF32;
  void* o = nullptr;     // [rows, head_count, head_dim] of o_dtype; 0 for a row without keys
  float* lse = nullptr;  // [rows, head_count]; natural log; -inf for a row without keys
  std::byte* workspace = nullptr;  // aligned to 1024 bytes
  int64_t workspace_slots = 0;     // as in the plan's shape
};

// Refuses, naming the field, what no kernel here supports.
Status Validate(const PrefillShape& shape);
Status Validate(const PrefillShape& shape, const PrefillOptions& options);

// Rows of no entry keep what they had.
Status LaunchPrefill(const PrefillChoice& choice, const PrefillShape& shape,
                     std::span<const PrefillPass> passes, const PrefillArgs& args,
                     cudaStream_t stream);

}  // namespace tributary::cuda
