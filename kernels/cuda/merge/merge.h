// Merges the partials of disjoint key sets (ranks, or the parts of a prefill) and applies sinks
// once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::cuda {

inline constexpr int kMaxMergeSources = 16;

// All pointers but the arrays themselves are device pointers.
struct MergeArgs {
  const void* o[kMaxMergeSources] = {};     // sources x [rows, heads, value_dim] of source_dtype
  const float* lse[kMaxMergeSources] = {};  // sources x [rows, heads]
  DType source_dtype = DType::kF32;         // f32, bf16 or f16
  // Heads in a row of each source and of the result, when only `heads` of them take part; the
  // pointers are to the first of those. 0: `heads`.
  int32_t source_heads[kMaxMergeSources] = {};
  int32_t out_heads = 0;
  int32_t sources = 0;
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;         // a multiple of 4
  const float* sinks = nullptr;  // [heads] or nullptr for none
  // Result: [rows, heads, value_dim] of out_dtype; may be a source of the same type and heads in a
  // row.
  void* out = nullptr;
  DType out_dtype = DType::kF32;  // f32, bf16, f16, fp8_e4m3 or fp8_e5m2
  float out_scale = 1.0f;         // stored = real / out_scale; FP8 saturates
  float* lse_out = nullptr;       // [rows, heads] or nullptr; LSE without the sink; may be a source
};

Status LaunchMerge(const MergeArgs& args, cudaStream_t stream);

// All kernels of this file (load_kernels.h).
Status LoadMergeKernels();

}  // namespace tributary::cuda
