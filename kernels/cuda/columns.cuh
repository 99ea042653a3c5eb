// What both attention kernels do with a block of columns before and after the keys: stage its
// queries and ranges in shared memory, and write its result or merge it with the job's other
// pieces.
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

// Weights are exp2(logit - reference + bias), where the reference follows the largest logit only
// when it is exceeded by kHeadroom; the final division makes any reference as good as another. In
// f16, whose largest power of two is 2^15 and whose subnormals end at 2^-24, the bias leaves the
// weights 31 bits below the reference.
inline constexpr float kHeadroom = 8.0f;
inline constexpr float kWeightBias = 7.0f;
// Of a column that has seen no key: below every logit, and finite, so that -inf minus it is -inf.
inline constexpr float kNoReference = -1e30f;

// Row r of a tile of S^T is token 4 * (r / 2) + r % 2 of a group, row r + 8 the token two further:
// so a thread of the second product holds four consecutive tokens.
__device__ __forceinline__ int TokenOfRow(int row) { return (row >> 1) * 4 + (row & 1); }

// Which of four slots from `slot` on some row of the block may see, as bits.
__device__ __forceinline__ uint32_t AliveTokens(const WorkItem& item, int slot) {
  uint32_t alive = 0;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (slot + i >= item.key_begin && slot + i < item.key_end) alive |= 1u << i;
  }
  return alive;
}

// A barrier of the block's first kThreads threads: those that compute.
template <int kThreads>
__device__ __forceinline__ void SyncThreads() {
  asm volatile("bar.sync 8, %0;" ::"n"(kThreads) : "memory");
}

// Per-column state in shared memory.
template <int kColumns>
struct ColumnState {
  float scale[kColumns];  // from a raw product to the logit that enters the softmax (base 2), or
                          // the soft cap (base e)
  RowKeys keys[kColumns];
};

// A power of two and its inverse.
struct PowerOfTwo {
  float value;
  float inverse;
};

// The power of two that brings the largest of a query's elements just below 2^14: f16 then neither
// overflows nor loses small elements, whatever the range of a bf16 or f32 query.
__device__ __forceinline__ PowerOfTwo QueryNormaliser(float max_abs) {
  const int exponent = static_cast<int>(__float_as_uint(max_abs) >> 23);  // biased
  if (max_abs == 0.0f || exponent == 255)
    return {1.0f, 1.0f};  // nothing to do, or infinite, or NaN
  const int clamped = max(exponent, 14);
  return {__uint_as_float(uint32_t(267 - clamped) << 23),
          __uint_as_float(uint32_t(clamped - 13) << 23)};
}

// Brings a block's queries from global to shared memory, in the compute type, in two halves, so
// that work can go on in between. Columns beyond the block's are zero.
template <DType kCompute, int kHeadDim, int kColumns, int kThreads>
class QueryStager {
 public:
  __device__ void Load(const AttentionArgs& args, const WorkItem& item) {
    const int group = args.q_heads / args.kv_heads;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      const int column = item.column_begin + unit / kVectors;
      raw_[i][0] = raw_[i][1] = make_uint4(0, 0, 0, 0);
      keys_[i] = {0, 0};
      if (unit / kVectors >= item.column_count) continue;
      const int row = item.row_begin + column / group;
      const int head = item.kv_head * group + column % group;
      const size_t element = (size_t(row) * args.q_heads + head) * kHeadDim + unit % kVectors * 8;
      const auto* from = reinterpret_cast<const uint4*>(static_cast<const std::byte*>(args.q) +
                                                        element * SizeOf(args.q_dtype));
      raw_[i][0] = __ldg(from);
      if (args.q_dtype == DType::kF32) raw_[i][1] = __ldg(from + 1);
      keys_[i] = args.keys[row];
    }
    k_scale_ = args.k_scale == nullptr ? 1.0f : __ldg(args.k_scale + item.kv_head);
  }

  // store(column, vector, x) takes dimensions [8 * vector, 8 * vector + 8) of a column.
  template <typename Store>
  __device__ void Finish(const AttentionArgs& args, ColumnState<kColumns>& state, Store store) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      if (unit >= kColumns * kVectors) return;  // the same for all lanes of a warp
      float x[8];
      ToFloat(args.q_dtype, raw_[i], x);
      float scale = args.sm_scale * k_scale_;
      if (kCompute == DType::kF16 && args.q_dtype != DType::kF16) {
        float max_abs = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) max_abs = fmaxf(max_abs, fabsf(x[e]));
#pragma unroll
        for (int lane = kVectors / 2; lane > 0; lane /= 2) {
          max_abs = fmaxf(max_abs, __shfl_xor_sync(0xffffffffu, max_abs, lane));
        }
        const PowerOfTwo normaliser = QueryNormaliser(max_abs);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= normaliser.value;
        scale *= normaliser.inverse;
      }
      const int column = unit / kVectors;
      store(column, unit % kVectors,
            make_uint4(Pack<kCompute>(x[0], x[1]), Pack<kCompute>(x[2], x[3]),
                       Pack<kCompute>(x[4], x[5]), Pack<kCompute>(x[6], x[7])));
      if (unit % kVectors == 0) {
        state.scale[column] = args.soft_cap > 0.0f ? scale / args.soft_cap : scale * kLog2E;
        state.keys[column] = keys_[i];
      }
    }
  }

 private:
  static constexpr int kVectors = kHeadDim / 8;  // lanes that share a column; a divisor of 32
  static constexpr int kOfThread = (kColumns * kVectors + kThreads - 1) / kThreads;

  static __device__ void ToFloat(DType type, const uint4 (&raw)[2], float (&x)[8]) {
    const uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                               raw[1].x, raw[1].y, raw[1].z, raw[1].w};
    if (type == DType::kF32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
    } else if (type == DType::kBf16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  uint4 raw_[kOfThread][2];
  RowKeys keys_[kOfThread];
  float k_scale_ = 1.0f;
};

// Caps scaled products; what comes out are logits in base 2.
template <int kCount>
__device__ __forceinline__ void CapLogits(float soft_cap, float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends.
    s[i] = soft_cap * kLog2E * (1.0f - __fdividef(2.0f, 1.0f + Exp2(2.0f * kLog2E * s[i])));
  }
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

// What the warps of a block found, each over its own keys, and what becomes of it.
template <int kWarps, int kColumns>
struct WarpResults {
  float reference[kWarps][kColumns];
  float sum[kWarps][kColumns];
  // By these a warp's unnormalised output enters the block's.
  float factor[kWarps][kColumns];
  float lse2[kColumns];  // of the block, in base 2
};

// Fills factor and lse2; the caller synchronises before and after. Sixteen lanes take a column.
template <int kWarps, int kColumns>
__device__ __forceinline__ void CombineWarps(WarpResults<kWarps, kColumns>& results, float v_scale,
                                             float bias) {
  static_assert(kWarps <= 16);
  const int warp = threadIdx.x % 16;
  for (int column = threadIdx.x / 16; column < kColumns; column += 2 * kWarps) {
    const float own = warp < kWarps ? results.reference[warp][column] : kNoReference;
    float sum = warp < kWarps ? results.sum[warp][column] : 0.0f;
    float reference = own;
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, mask));
    }
    const float factor = Exp2(own - reference);
    sum *= factor;
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (warp < kWarps) results.factor[warp][column] = sum == 0.0f ? 0.0f : factor * v_scale / sum;
    if (warp == 0) {
      results.lse2[column] = sum == 0.0f ? EmptyLse<float>() : reference + __log2f(sum) - bias;
    }
  }
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
  constexpr int kBatch = 16;  // loads in flight
  const int lane = threadIdx.x % 32;
  const int d = d_begin + 2 * lane;
  const float* lse = args.partial_lse + size_t(item.partial_begin) * kColumns + column;
  const float* o = args.partial_o + (size_t(item.partial_begin) * kColumns + column) * kHeadDim + d;
  float2 x[kBatch];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      x[i] = make_float2(0.0f, 0.0f);
      if (begin + i < item.partial_count) {
        x[i] = __ldcg(reinterpret_cast<const float2*>(o + size_t(begin + i) * kColumns * kHeadDim));
      }
    }
  };
  const auto lse_of = [&](int i) {
    return i < item.partial_count ? __ldcg(lse + i * kColumns) : EmptyLse<float>();
  };
  load(0);
  float mine = lse_of(lane);
  float max = mine;
  for (int i = lane + 32; i < item.partial_count; i += 32) max = fmaxf(max, lse_of(i));
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
  }
  const float base = max == EmptyLse<float>() ? 0.0f : max;
  float sum = 0.0f;
  float2 total = make_float2(0.0f, 0.0f);
  for (int begin = 0; begin < item.partial_count; begin += kBatch) {
    if (begin > 0) load(begin);
    if (begin > 0 && begin % 32 == 0) mine = lse_of(begin + lane);
    const float weight = Exp2(mine - base);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(0xffffffffu, weight, begin % 32 + i);
      sum += w;
      total.x += w * x[i].x;
      total.y += w * x[i].y;
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const size_t at = OutputIndex(args, item, column);
  *reinterpret_cast<float2*>(args.o + at * kHeadDim + d) =
      make_float2(total.x * inverse, total.y * inverse);
  if (d == 0) args.lse[at] = (sum == 0.0f ? EmptyLse<float>() : max + __log2f(sum)) * kLn2;
}

// Called by all threads after a piece of a cut job is in the workspace. The last of the job's
// pieces merges them all and leaves the counter at zero for the next launch.
template <int kHeadDim, int kColumns, int kThreads>
__device__ __forceinline__ void MergeIfLast(const AttentionArgs& args, const WorkItem& item,
                                            int* is_last /* shared */) {
  SyncThreads<kThreads>();
  if (threadIdx.x == 0) {
    // Releases what the block wrote (the barrier makes it cumulative) and acquires the others'.
    __threadfence();
    const uint32_t before = atomicAdd(args.arrivals + item.job, 1u);
    *is_last = before + 1 == static_cast<uint32_t>(item.partial_count);
    if (*is_last) args.arrivals[item.job] = 0;
    __threadfence();
  }
  SyncThreads<kThreads>();
  if (!*is_last) return;
  constexpr int kSlices = kHeadDim / 64;
  for (int slice = threadIdx.x / 32; slice < item.column_count * kSlices; slice += kThreads / 32) {
    MergeColumn<kHeadDim, kColumns>(args, item, slice / kSlices, slice % kSlices * 64);
  }
}

}  // namespace tributary::cuda
