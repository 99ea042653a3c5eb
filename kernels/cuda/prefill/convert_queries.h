// Converts queries to the type that the prefill kernels multiply, when they have another one.
// prefill.cc calls it once for every call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/kv_geometry.h"

namespace tributary::cuda {

// All pointers are device pointers, aligned to 16 bytes.
struct ConvertQueriesArgs {
  const void* q = nullptr;   // [rows, q_heads, key_dim] of `from`
  DType from = DType::kF32;  // f32, bf16 or f16
  DType to = DType::kBf16;   // bf16, f16 or fp8_e4m3
  bool rounds = false;       // to f16: elements are rounded to e4m3 first
  int64_t heads = 0;         // rows * q_heads
  KvGeometry geometry;       // of the keys they meet; a row of kernels/head_dims.h
  std::byte* out = nullptr;  // [rows, q_heads, key_dim] of `to`
  float* scale = nullptr;    // [rows, q_heads]: q = out * scale
};
cudaError_t RunConvertQueries(const ConvertQueriesArgs& args, cudaStream_t stream);

}  // namespace tributary::cuda
