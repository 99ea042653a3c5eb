// Merges the partials of disjoint key sets (ranks, or the parts of a prefill) and applies sinks
// once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/output_format.h"
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
  DType out_dtype = DType::kF32;  // f32, bf16, f16, fp8_e4m3, fp8_e5m2 or nvfp4
  float out_scale = 1.0f;  // of FP8: stored = real / out_scale, saturated; of NVFP4 the tensor's
  // Of NVFP4 (kernels/nvfp4.h; value_dim a multiple of 16): [rows, out_heads, value_dim / 16].
  uint8_t* out_block_scales = nullptr;
  float* lse_out = nullptr;  // [rows, heads] or nullptr; LSE without the sink; may be a source
  // On sm_90 and later: the launch begins while the one ahead of it ends.
  bool begins_early = false;
};

// Of one source in f32, o: [rows, heads, value_dim] and lse: [rows, heads]. Such a merge converts a
// result that is whole.
inline MergeArgs ConversionOf(const float* o, const float* lse, int32_t rows, int32_t heads,
                              int32_t value_dim) {
  MergeArgs args;
  args.o[0] = o;
  args.lse[0] = lse;
  args.sources = 1;
  args.rows = rows;
  args.heads = heads;
  args.value_dim = value_dim;
  return args;
}

// Stores the result as an output of its own: rows x heads x value_dim, which are set, at `to`.
inline void SetOutput(const OutputFormat& format, std::byte* to, MergeArgs* args) {
  args->out = to;
  args->out_dtype = format.dtype;
  if (!IsUnscaled(format.dtype)) args->out_scale = format.scale;
  if (format.dtype != DType::kNvfp4) return;
  args->out_block_scales = reinterpret_cast<uint8_t*>(
      to + Nvfp4ScalesOffset(int64_t{args->rows} * args->heads * args->value_dim));
}

Status LaunchMerge(const MergeArgs& args, cudaStream_t stream);

// All kernels of this file (load_kernels.h).
Status LoadMergeKernels();

}  // namespace tributary::cuda
