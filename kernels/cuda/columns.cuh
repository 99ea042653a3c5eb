// What both attention kernels do with a block of columns before and after the keys: stage its queries
// and ranges in shared memory, and write its result or merge it with the job's other pieces.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/attention_args.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Per-column state in shared memory.
template <int kColumns>
struct ColumnState {
  float scale[kColumns];  // from a raw product to the logit that enters the softmax (base 2), or the
                          // soft cap (base e)
  RowKeys keys[kColumns];
};

// Eight query elements from `element` on, as floats.
__device__ __forceinline__ void LoadQuery8(const AttentionArgs& args, size_t element, float (&x)[8]) {
  if (args.q_dtype == DType::kF32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(args.q) + element);
    const float4 low = __ldg(from);
    const float4 high = __ldg(from + 1);
    const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = all[i];
    return;
  }
  const uint4 v =
      __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.q) + element));
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if (args.q_dtype == DType::kBf16) {
      pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[i]));
    } else {
      pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    }
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// The power of two that brings the largest of a query's elements just below 2^14: f16 then neither
// overflows nor loses small elements, whatever the range of a bf16 or f32
// query. NaN and infinity pass.
__device__ __forceinline__ int QueryExponent(float max_abs) {
  if (!(max_abs > 0.0f) || !(max_abs < 3.0e38f)) return 0;
  return 13 - ilogbf(max_abs);
}

// Stages a block's queries in the compute type. `address(column, vector)` is where the 16 bytes with
// dimensions [8 * vector, 8 * vector + 8) of a column go. Columns beyond the block's are zero.
template <DType kCompute, int kHeadDim, int kColumns, typename Address>
__device__ __forceinline__ void StageQueries(const AttentionArgs& args, const WorkItem& item,
                                             ColumnState<kColumns>& state, Address address) {
  constexpr int kVectors = kHeadDim / 8;  // lanes that share a column; a divisor of 32
  const int group = args.q_heads / args.kv_heads;
  const float k_scale = args.k_scale == nullptr ? 1.0f : args.k_scale[item.kv_head];
  for (int i = threadIdx.x; i < kColumns * kVectors; i += blockDim.x) {
    const int column = i / kVectors;
    const int vector = i % kVectors;
    const bool alive = column < item.column_count;
    float x[8] = {};
    int row = item.row_begin;
    if (alive) {
      row += (item.column_begin + column) / group;
      const int head = item.kv_head * group + (item.column_begin + column) % group;
      LoadQuery8(args, (size_t(row) * args.q_heads + head) * kHeadDim + vector * 8, x);
    }
    float scale = args.sm_scale * k_scale;
    if constexpr (kCompute == DType::kF16) {
      if (args.q_dtype != DType::kF16) {
        float max_abs = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) max_abs = fmaxf(max_abs, fabsf(x[e]));
#pragma unroll
        for (int lane = kVectors / 2; lane > 0; lane /= 2) {
          max_abs = fmaxf(max_abs, __shfl_xor_sync(0xffffffffu, max_abs, lane));
        }
        const int exponent = QueryExponent(max_abs);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = ldexpf(x[e], exponent);
        scale = ldexpf(scale, -exponent);
      }
    }
    *address(column, vector) = make_uint4(Pack<kCompute>(x[0], x[1]), Pack<kCompute>(x[2], x[3]),
                                          Pack<kCompute>(x[4], x[5]), Pack<kCompute>(x[6], x[7]));
    if (vector == 0) {
      state.scale[column] = args.soft_cap > 0.0f ? scale / args.soft_cap : scale * kLog2E;
      state.keys[column] = alive ? args.keys[row] : RowKeys{0, 0};
    }
  }
}

// A logit in base 2 from a scaled product.
__device__ __forceinline__ float Logit2(float scaled, float soft_cap) {
  if (soft_cap > 0.0f) {
    // tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends.
    scaled = soft_cap * kLog2E * (1.0f - __fdividef(2.0f, 1.0f + Exp2(2.0f * kLog2E * scaled)));
  }
  return scaled;
}

// Where column `column` of the item's block is in O and LSE.
__device__ __forceinline__ size_t OutputIndex(const AttentionArgs& args, const WorkItem& item,
                                              int column) {
  const int group = args.q_heads / args.kv_heads;
  const int c = item.column_begin + column;
  return size_t(item.row_begin + c / group) * args.q_heads + item.kv_head * group + c % group;
}

__device__ __forceinline__ float ValueScale(const AttentionArgs& args, const WorkItem& item) {
  return args.v_scale == nullptr ? 1.0f : args.v_scale[item.kv_head];
}

// Writes two neighbouring dimensions of a column's normalised output and, once a column, its LSE in
// base 2; to the result, or to the workspace when the job was cut.
template <int kHeadDim, int kColumns>
__device__ __forceinline__ void StoreColumn(const AttentionArgs& args, const WorkItem& item,
                                            int column, int d, float2 o, float lse2) {
  if (item.partial_count == 1) {
    const size_t at = OutputIndex(args, item, column);
    *reinterpret_cast<float2*>(args.o + at * kHeadDim + d) = o;
    if (d == 0) args.lse[at] = lse2 * kLn2;
  } else {
    const size_t at = size_t(item.partial_begin + item.partial_index) * kColumns + column;
    __stcg(reinterpret_cast<float2*>(args.partial_o + at * kHeadDim + d), o);
    if (d == 0) __stcg(args.partial_lse + at, lse2);
  }
}

// Merges the partials of a column, in order. A warp takes 64 dimensions of one column.
template <int kHeadDim, int kColumns>
__device__ __forceinline__ void MergeColumn(const AttentionArgs& args, const WorkItem& item,
                                            int column, int d_begin) {
  const int lane = threadIdx.x % 32;
  const int d = d_begin + 2 * lane;
  const float* lse = args.partial_lse + size_t(item.partial_begin) * kColumns + column;
  const float* o = args.partial_o + (size_t(item.partial_begin) * kColumns + column) * kHeadDim + d;
  float max = EmptyLse<float>();
  for (int i = lane; i < item.partial_count; i += 32) {
    max = fmaxf(max, __ldcg(lse + i * kColumns));
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
  }
  const float base = max == EmptyLse<float>() ? 0.0f : max;
  float sum = 0.0f;
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 8
  for (int i = 0; i < item.partial_count; ++i) {
    const float weight = Exp2(__ldcg(lse + i * kColumns) - base);
    const float2 x = __ldcg(reinterpret_cast<const float2*>(o + size_t(i) * kColumns * kHeadDim));
    sum += weight;
    total.x += weight * x.x;
    total.y += weight * x.y;
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const size_t at = OutputIndex(args, item, column);
  *reinterpret_cast<float2*>(args.o + at * kHeadDim + d) =
      make_float2(total.x * inverse, total.y * inverse);
  if (d == 0) {
    args.lse[at] = (sum == 0.0f ? EmptyLse<float>() : max + log2f(sum)) * kLn2;
  }
}

// Called by all threads after a piece of a cut job is in the workspace. The last of the job's pieces
// merges them all and leaves the counter at zero for the next launch.
template <int kHeadDim, int kColumns>
__device__ __forceinline__ void MergeIfLast(const AttentionArgs& args, const WorkItem& item,
                                            int* is_last /* shared */) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t before = atomicAdd(args.arrivals + item.job, 1u);
    *is_last = before + 1 == static_cast<uint32_t>(item.partial_count);
    if (*is_last) args.arrivals[item.job] = 0;
  }
  __syncthreads();
  if (!*is_last) return;
  __threadfence();
  constexpr int kSlices = kHeadDim / 64;
  const int warps = blockDim.x / 32;
  for (int slice = threadIdx.x / 32; slice < item.column_count * kSlices; slice += warps) {
    MergeColumn<kHeadDim, kColumns>(args, item, slice / kSlices, slice % kSlices * 64);
  }
}

}  // namespace tributary::cuda
