// Brings the operands of a prefill into the form its kernels take: rows of elements of the type
// computed in.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/prefill/prefill_plan.h"
#include "kernels/dtype.h"

namespace tributary::cuda {

// All pointers are device pointers.
struct GatherArgs {
  const PrefillGather* gathers = nullptr;  // of one pass
  int32_t gather_count = 0;
  const int32_t* page_tables = nullptr;
  const std::byte* cache = nullptr;
  DType kv = DType::kBf16;       // of the cache
  DType compute = DType::kBf16;  // bf16 or f16; the cache's type when that has 16 bits
  int32_t page_size = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  bool keep_keys = false;  // of FP8: keys keep their type
  // Both [kGatherSlots * gather_count, kv_heads, head_dim], without their scales.
  std::byte* k = nullptr;
  std::byte* v = nullptr;
};
cudaError_t RunGatherPages(const GatherArgs& args, cudaStream_t stream);

// All pointers are device pointers.
struct ConvertQueriesArgs {
  const void* q = nullptr;  // [rows, q_heads, head_dim] of `from`
  DType from = DType::kF32;
  DType to = DType::kBf16;  // bf16, f16 or fp8_e4m3
  bool rounds = false;      // f16: to e4m3 first
  int64_t heads = 0;        // rows * q_heads
  int32_t head_dim = 0;
  std::byte* out = nullptr;  // [rows, q_heads, head_dim]
  float* scale = nullptr;    // [rows, q_heads]: q = out * scale
};
cudaError_t RunConvertQueries(const ConvertQueriesArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
