// What all decode kernels do with the packed rows of a query tile apart from attending: find the
// queries they stand for, and write the result or merge it with the job's other splits.
//
// A packed row is one query row of one of the query heads that share a KV head. The packed rows of
// a sequence and KV head are numbered query row by query row, head by head.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"
#include "kernels/dtype.h"
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
// The reference of a packed row that has seen no key: it is below every logit, and finite, so that
// -inf minus it is -inf.
inline constexpr float kNoReference = -1e30f;

// Row r < 8 of a tile of S^T is slot 4 * (r / 2) + r % 2 of its strip, and row r + 8 is the slot
// two further: so a thread of the second product holds four consecutive slots.
__device__ __forceinline__ int TokenOfRow(int row) { return (row >> 1) * 4 + (row & 1); }

// Which of the four slots from `slot` on some row of the query tile may see: one bit per slot.
template <typename Item>
__device__ __forceinline__ uint32_t AliveTokens(const Item& item, int slot) {
  uint32_t alive = 0;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (slot + i >= item.key_begin && slot + i < item.key_end) alive |= 1u << i;
  }
  return alive;
}

// The first threads of the thread block begin to copy an item to shared memory; WaitForCopies ends
// that.
__device__ __forceinline__ void CopyItem(const AttentionArgs& args, int index, WorkItem* to) {
  if (threadIdx.x < sizeof(WorkItem) / 16) {
    CopyAsync16(reinterpret_cast<uint4*>(to) + threadIdx.x,
                reinterpret_cast<const uint4*>(args.items + index) + threadIdx.x);
  }
}

// A barrier of the kThreads threads of a thread block that compute.
template <int kThreads>
__device__ __forceinline__ void SyncThreads() {
  asm volatile("bar.sync 8, %0;" ::"n"(kThreads) : "memory");
}

// A barrier of kThreads threads of a thread block. Those that call ArriveAtBlock do not wait for
// it.
template <int kThreads, int kBarrier = 0>
__device__ __forceinline__ void SyncBlock() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kThreads, int kBarrier = 0>
__device__ __forceinline__ void ArriveAtBlock() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// What shared memory holds for each packed row of the query tile.
template <int kTileRows>
struct PackedRowState {
  alignas(16) float scale[kTileRows];  // from a raw product to the logit that enters the softmax
                                       // (base 2), or the soft cap (base e)
  alignas(16) RowKeys keys[kTileRows];
};

// The query row, counted from the first one of the item's sequence, that a packed row of the item's
// query tile belongs to.
__device__ __forceinline__ int QueryRowOf(const AttentionArgs& args, const WorkItem& item,
                                          int packed_row) {
  // Exact: the half keeps the quotient as far from an integer as rounding can never bring it.
  return static_cast<int>((static_cast<float>(item.packed_begin + packed_row) + 0.5f) *
                          args.inverse_gqa_ratio);
}

// Where a packed row of the item's query tile is in Q, O and LSE: its index among [rows, q_heads].
__device__ __forceinline__ size_t OutputIndex(const AttentionArgs& args, const WorkItem& item,
                                              int packed_row) {
  const int row = QueryRowOf(args, item, packed_row);
  const int head =
      item.kv_head * args.gqa_ratio + item.packed_begin + packed_row - row * args.gqa_ratio;
  return size_t(item.row_begin + row) * args.q_heads + head;
}

// Up to this cap, a tanh with an absolute error of fp32 gives logits with one of 4e-6.
inline constexpr float kMostSoftCapOfQuickTanh = 64.0f;

// tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends, with an absolute error of fp32.
__device__ __forceinline__ float QuickTanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + Exp2(2.0f * kLog2E * x));
}
// The same with a relative error of fp32: near 0 by its series.
__device__ __forceinline__ float PreciseTanh(float x) {
  const float x2 = x * x;
  float ratio = fmaf(62.0f / 2835.0f, x2, -17.0f / 315.0f);
  ratio = fmaf(ratio, x2, 2.0f / 15.0f);
  ratio = fmaf(ratio, x2, -1.0f / 3.0f);
  return fabsf(x) < 0.25f ? fmaf(ratio * x2, x, x) : QuickTanh(x);
}

// Caps products that were scaled and divided by the cap; what comes out are logits in base 2. A cap
// that is far above all logits leaves them their precision. soft_cap: a BoundedSoftCap.
template <int kCount>
__device__ __forceinline__ void CapLogits(float soft_cap, float (&s)[kCount]) {
  const bool quick = soft_cap <= kMostSoftCapOfQuickTanh;  // the same for the whole launch
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = soft_cap * kLog2E * (quick ? QuickTanh(s[i]) : PreciseTanh(s[i]));
  }
}

// What sums of values are multiplied by, as they were widened.
template <DType kKv>
__device__ __forceinline__ float ValueScale(const AttentionArgs& args, const WorkItem& item) {
  return ElementUnit(kKv) * (args.v_scale == nullptr ? 1.0f : args.v_scale[item.kv_head]);
}

// Writes four neighbouring dimensions of a row of the result and, for d = 0, its LSE (given in base
// 2). A kernel that runs beside this one may poll these words before this one has ended, so every
// word is written once and whole.
__device__ __forceinline__ void StoreResult(const AttentionArgs& args, size_t at, int value_dim,
                                            int d, float4 o, float lse2) {
  StoreRelaxed(args.o + at * value_dim + d, o);
  if (d == 0) StoreRelaxed(args.lse + at, lse2 * kLn2);
}

// Writes four neighbouring dimensions of a packed row's normalised output and, for d = 0, its LSE
// in base 2: to the result, or to the workspace if the job was split.
template <int kValueDim, int kTileRows>
__device__ __forceinline__ void StorePackedRow(const AttentionArgs& args, const WorkItem& item,
                                               int packed_row, int d, float4 o, float lse2) {
  if (item.split_count == 1) {
    StoreResult(args, OutputIndex(args, item, packed_row), kValueDim, d, o, lse2);
  } else {
    const size_t at = size_t(item.partial_begin + item.split_index) * kTileRows + packed_row;
    __stcg(reinterpret_cast<float4*>(args.partial_o + at * kValueDim + d), o);
    if (d == 0) __stcg(args.partial_lse + at, lse2);
  }
}

__device__ __forceinline__ void AddScaled(float4& sum, float factor, float4 x) {
  sum.x += factor * x.x;
  sum.y += factor * x.y;
  sum.z += factor * x.z;
  sum.w += factor * x.w;
}

// Four dimensions of a packed row's output, and its LSE in base 2.
struct PackedRowPart {
  float4 o;
  float lse2;
};

// Merges `count` parts of kUnits units, in order. load_lse(u, i) and load_o(u, i) give part i of
// unit u; kBatch of each are in flight.
template <int kUnits, int kBatch, typename LoadLse, typename LoadO>
__device__ __forceinline__ void MergeParts(int count, LoadLse load_lse, LoadO load_o,
                                           PackedRowPart (&merged)[kUnits]) {
  float max[kUnits];
  float sum[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    max[u] = kNoReference;
    sum[u] = 0.0f;
    merged[u].o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kBatch) {
    float lse2[kUnits][kBatch];
    float4 x[kUnits][kBatch];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool alive = begin + i < count;
        lse2[u][i] = alive ? load_lse(u, begin + i) : EmptyLse<float>();
        x[u][i] = alive ? load_o(u, begin + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float raised = max[u];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) raised = fmaxf(raised, lse2[u][i]);
      const float factor = Exp2(max[u] - raised);
      max[u] = raised;
      sum[u] *= factor;
      float4& total = merged[u].o;
      total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = Exp2(lse2[u][i] - raised);
        sum[u] += weight;
        AddScaled(total, weight, x[u][i]);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const float inverse = sum[u] == 0.0f ? 0.0f : __fdividef(1.0f, sum[u]);
    float4& o = merged[u].o;
    o = make_float4(o.x * inverse, o.y * inverse, o.z * inverse, o.w * inverse);
    merged[u].lse2 = sum[u] == 0.0f ? EmptyLse<float>() : max[u] + __log2f(sum[u]);
  }
}

}  // namespace tributary::cuda
