// What all attention kernels do with a block of columns beside the keys: say which queries they
// are, combine what warps found, and write the result or merge it with the job's other pieces.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
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
template <typename Item>
__device__ __forceinline__ uint32_t AliveTokens(const Item& item, int slot) {
  uint32_t alive = 0;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (slot + i >= item.key_begin && slot + i < item.key_end) alive |= 1u << i;
  }
  return alive;
}

// By the block's first threads: begins to copy an item to shared memory; WaitForCopies ends it.
__device__ __forceinline__ void CopyItem(const AttentionArgs& args, int index, WorkItem* to) {
  if (threadIdx.x < sizeof(WorkItem) / 16) {
    CopyAsync16(reinterpret_cast<uint4*>(to) + threadIdx.x,
                reinterpret_cast<const uint4*>(args.items + index) + threadIdx.x);
  }
}

// A barrier of the block's first kThreads threads: those that compute.
template <int kThreads>
__device__ __forceinline__ void SyncThreads() {
  asm volatile("bar.sync 8, %0;" ::"n"(kThreads) : "memory");
}

// A barrier of all of a block's threads, or of so many, of which some only say that they have come.
template <int kThreads, int kBarrier = 0>
__device__ __forceinline__ void SyncBlock() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kThreads, int kBarrier = 0>
__device__ __forceinline__ void ArriveAtBlock() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Per-column state in shared memory.
template <int kColumns>
struct ColumnState {
  alignas(16) float scale[kColumns];  // from a raw product to the logit that enters the softmax
                                      // (base 2), or the soft cap (base e)
  alignas(16) RowKeys keys[kColumns];
};

// The query row of the item's sequence to which a column of its block belongs.
__device__ __forceinline__ int RowOfColumn(const AttentionArgs& args, const WorkItem& item,
                                           int column) {
  // Exact: the half keeps the quotient as far from an integer as rounding can never bring it.
  return static_cast<int>((static_cast<float>(item.column_begin + column) + 0.5f) *
                          args.group_inverse);
}

// Where a column of the item's block is in Q, O and LSE.
__device__ __forceinline__ size_t OutputIndex(const AttentionArgs& args, const WorkItem& item,
                                              int column) {
  const int row = RowOfColumn(args, item, column);
  const int head = item.kv_head * args.group + item.column_begin + column - row * args.group;
  return size_t(item.row_begin + row) * args.q_heads + head;
}

// Caps scaled products; what comes out are logits in base 2.
template <int kCount>
__device__ __forceinline__ void CapLogits(float soft_cap, float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // tanh(x) = 1 - 2 / (1 + e^2x), exact at both ends.
    s[i] = soft_cap * kLog2E * (1.0f - __fdividef(2.0f, 1.0f + Exp2(2.0f * kLog2E * s[i])));
  }
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
#pragma unroll 1
  for (int begin = 0; begin < kColumns; begin += 2 * kWarps) {
    const int column = begin + threadIdx.x / 16;
    const bool alive = warp < kWarps && column < kColumns;
    const float own = alive ? results.reference[warp][column] : kNoReference;
    float sum = alive ? results.sum[warp][column] : 0.0f;
    float reference = own;
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, mask));
    }
    const float factor = Exp2(own - reference);
    sum *= factor;
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (alive) results.factor[warp][column] = sum == 0.0f ? 0.0f : factor * v_scale / sum;
    if (alive && warp == 0) {
      results.lse2[column] = sum == 0.0f ? EmptyLse<float>() : reference + __log2f(sum) - bias;
    }
  }
}

// Four neighbouring dimensions of a column of the result and, once a column, its LSE in base 2. A
// kernel beside this one may look at them before this one has ended, each word when it is there.
__device__ __forceinline__ void StoreResult(const AttentionArgs& args, size_t at, int value_dim,
                                            int d, float4 o, float lse2) {
  StoreRelaxed(args.o + at * value_dim + d, o);
  if (d == 0) StoreRelaxed(args.lse + at, lse2 * kLn2);
}

// Writes four neighbouring dimensions of a column's normalised output and, once a column, its LSE
// in base 2; to the result, or to the workspace when the job was cut.
template <int kValueDim, int kColumns>
__device__ __forceinline__ void StoreColumn(const AttentionArgs& args, const WorkItem& item,
                                            int column, int d, float4 o, float lse2) {
  if (item.partial_count == 1) {
    StoreResult(args, OutputIndex(args, item, column), kValueDim, d, o, lse2);
  } else {
    const size_t at = size_t(item.partial_begin + item.partial_index) * kColumns + column;
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

// Four dimensions of a column, and its LSE in base 2.
struct ColumnPart {
  float4 o;
  float lse2;
};

// Merges `count` parts of kUnits units, in order. load_lse(u, i) and load_o(u, i) give part i of
// unit u; kBatch of each are in flight.
template <int kUnits, int kBatch, typename LoadLse, typename LoadO>
__device__ __forceinline__ void MergeParts(int count, LoadLse load_lse, LoadO load_o,
                                           ColumnPart (&merged)[kUnits]) {
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

// Merges what the blocks of a cluster found of an item: `o` and `lse2` (base 2) lie at the same
// place in the shared memory of each. A block merges its share of the columns and
// store(column, d, part) takes them.
template <int kValueDim, int kColumns, int kThreads, typename Store>
__device__ __forceinline__ void MergeCluster(const ClusterPlace& place,
                                             const float (*o)[kValueDim + 4], const float* lse2,
                                             Store store) {
  constexpr int kUnits = kValueDim / 4;  // of a column
  const auto merge = [&]<int kSize>(std::integral_constant<int, kSize>) {
    constexpr int kOfBlock = kColumns / kSize * kUnits;
    constexpr int kOfThread = (kOfBlock + kThreads - 1) / kThreads;
    // Whether every thread that goes on has a unit in every round.
    constexpr bool kFull = kOfBlock < kThreads || kOfBlock % kThreads == 0;
    const auto unit_of = [&](int u) {
      const int unit = u * kThreads + static_cast<int>(threadIdx.x);
      return kFull ? unit : min(unit, kOfBlock - 1);
    };
    const auto column_of = [&](int u) {
      return static_cast<int>(place.rank) * (kColumns / kSize) + unit_of(u) / kUnits;
    };
    // The same in every round where a round is a number of whole columns.
    [[maybe_unused]] const int own_dim = threadIdx.x % kUnits * 4;
    const auto dim_of = [&](int u) {
      if constexpr (kThreads % kUnits == 0) {
        return own_dim;
      } else {
        return unit_of(u) % kUnits * 4;
      }
    };
    if (kOfBlock < kThreads && threadIdx.x >= kOfBlock) return;
    ColumnPart merged[kOfThread];
    MergeParts<kOfThread, kSize>(
        kSize, [&](int u, int i) { return LoadFloatIn(SharedAddressIn(lse2 + column_of(u), i)); },
        [&](int u, int i) { return LoadFloat4In(SharedAddressIn(&o[column_of(u)][dim_of(u)], i)); },
        merged);
#pragma unroll
    for (int u = 0; u < kOfThread; ++u) {
      if (!kFull && u * kThreads + static_cast<int>(threadIdx.x) >= kOfBlock) continue;
      store(column_of(u), dim_of(u), merged[u]);
    }
  };
  if (place.size == 2) merge(std::integral_constant<int, 2>{});
  if (place.size == 4) merge(std::integral_constant<int, 4>{});
  if (place.size == 8) merge(std::integral_constant<int, 8>{});
  static_assert(kMaxClusterSize == 8);
}

}  // namespace tributary::cuda
