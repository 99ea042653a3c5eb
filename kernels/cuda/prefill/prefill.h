// Prefill on one GPU: attention of many query rows (meant for more than 64 per sequence, but fewer
// work, too) over context in the paged cache, or over the new tokens themselves.
//
// clang-format off
//   // Once per cache:
//   const PrefillChoice choice = ChoosePrefill(device, shape);
//   // Once per step:
//   const PrefillPlanShape plan_shape = PrefillPlanShapeFor(choice, shape, device, workspace_slots);
//   PlanPrefillContext(plan_shape, entries, keys, &plan);  // or PlanPrefillNewTokens
//   ... copy plan.items, plan.keys and plan.gathers to the device ...
//   // Once per layer:
//   LaunchPrefill(choice, shape, plan.passes, args, stream);
// clang-format on
//
// The two parts of a prefill, context and new tokens, are two such calls. With `accumulate` in the
// plan's shape the second merges its result with that of the first, in place. A launch allocates
// nothing, waits for nothing and reads nothing back, so it can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <string>

#include "kernels/cuda/architectures.h"
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
  bool portable = false;  // leaves out what only some architectures have
  // Over an FP8 cache, queries are rounded to e4m3, too, with one scale per row and head. Where
  // there is wgmma they are multiplied with the keys as they are, which is faster.
  bool fp8_queries = false;
  // With fp8_queries: weights are rounded to e4m3 where there is wgmma, and multiplied with the
  // values as they are, which is faster again. A weight keeps four significant bits, and none when
  // it is below 2^-16 of the row's largest. Elsewhere it changes nothing.
  bool fp8_weights = false;
  bool batch_invariant = false;  // as in PrefillPlanShape
};

enum class PrefillKind {
  kMma,      // prefill/sm80, which every architecture can run
  kWgmma,    // prefill/sm90, where there is wgmma
  kTcgen05,  // prefill/sm100, where there is tcgen05
};

struct PrefillChoice {
  PrefillKind kind = PrefillKind::kMma;
  DType compute = DType::kBf16;  // the type multiplied, unless it is FP8: bf16 or f16
  bool fp8_queries = false;      // queries are rounded to FP8
  bool fp8_weights = false;      // weights are rounded to FP8
  bool batch_invariant = false;  // PrefillOptions
  int32_t rows_per_tile = 64;    // query rows of a query tile
  int32_t keys_per_tile = 64;    // slots of a KV tile
};
std::string ToString(const PrefillChoice& choice);

// Chooses the first of tcgen05, wgmma and mma.sync that the device's code can use and whose kernels
// are built for the shape's head dims. Pure functions of their arguments. Products are computed in
// the type of K and V when that has 16 bits; FP8 is exact in either type, so the queries decide.
PrefillChoice ChoosePrefill(const DeviceProperties& device, const PrefillShape& shape,
                            const PrefillOptions& options = {});
PrefillChoice ChoosePrefillWith(const Features& features, const PrefillShape& shape,
                                const PrefillOptions& options = {});
PrefillPlanShape PrefillPlanShapeFor(const PrefillChoice& choice, const PrefillShape& shape,
                                     const DeviceProperties& device, int64_t workspace_slots = 0);

// The bytes that the workspace of a call must hold. It takes converted queries, when their type is
// not the one multiplied, and for context `workspace_slots` gathered slots and the partials of rows
// that are split over keys.
size_t PrefillWorkspaceBytes(const PrefillChoice& choice, const PrefillShape& shape, int64_t rows,
                             int64_t workspace_slots);

// All pointers are device pointers; the caller owns what they point to and keeps it until the
// launch has ended.
struct PrefillArgs {
  const PrefillItem* items = nullptr;      // the plan's
  const PrefillGather* gathers = nullptr;  // the plan's
  const RowKeys* keys = nullptr;           // the plan's, [rows]
  int32_t rows = 0;
  const void* q = nullptr;  // [rows, q_heads, key_dim], aligned to 16 bytes
  // New tokens.
  const void* k = nullptr;  // [tokens, kv_heads, key_dim], aligned to 16 bytes
  const void* v = nullptr;  // [tokens, kv_heads, value_dim], aligned to 16 bytes
  int32_t tokens = 0;
  // Context.
  const int32_t* page_tables = nullptr;
  const std::byte* cache = nullptr;  // [num_pages, PageBytes]; see page_layout.h
  const float* k_scale = nullptr;    // [kv_heads] or nullptr for ones
  const float* v_scale = nullptr;    // [kv_heads] or nullptr for ones

  float sm_scale = 1.0f;
  float soft_cap = 0.0f;  // > 0: logits = soft_cap * tanh(logits / soft_cap)
  // f32, or bf16 or f16 for a plan of one pass that does not accumulate.
  DType o_dtype = DType::kF32;
  void* o = nullptr;     // [rows, head_count, value_dim] of o_dtype; 0 for a row without keys
  float* lse = nullptr;  // [rows, head_count]; natural log; -inf for a row without keys
  std::byte* workspace = nullptr;  // aligned to 1024 bytes
  int64_t workspace_slots = 0;     // as in the plan's shape
};

// Refuses what no kernel here supports, and names the field.
Status Validate(const PrefillShape& shape);
Status Validate(const PrefillShape& shape, const PrefillOptions& options);

// Launches all passes of a plan. Rows that belong to no entry keep the result they had.
Status LaunchPrefill(const PrefillChoice& choice, const PrefillShape& shape,
                     std::span<const PrefillPass> passes, const PrefillArgs& args,
                     cudaStream_t stream);

}  // namespace tributary::cuda
