// What the prefill kernels do with their output rows: rescale them, and write or merge the result.
//
// A thread holds the outputs of two rows in the places that row_softmax.cuh describes.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

// Multiplies the thread's outputs, one factor per row.
template <int kCount>
__device__ __forceinline__ void ScaleRows(const float (&factor)[2], float (&o)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

// How many of a row's loads are in flight together: the largest divisor of their number up to 16.
constexpr int LoadBatch(int loads) {
  int batch = loads < 16 ? loads : 16;
  while (loads % batch != 0) --batch;
  return batch;
}

// Writes the thread's share of row r in f32. With `accumulate` it adds `before` times what is
// already there, which it reads in few batches, because no load passes a store.
template <int kValueDim, int kOutputs>
__device__ __forceinline__ void StoreRow(float* to, int r, float factor, bool accumulate,
                                         float before, const float (&o)[kOutputs]) {
  constexpr int kBatch = LoadBatch(kValueDim / 8);
#pragma unroll
  for (int begin = 0; begin < kValueDim / 8; begin += kBatch) {
    float2 old[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      old[i] = make_float2(0.0f, 0.0f);
      if (accumulate) old[i] = *reinterpret_cast<const float2*>(to + (begin + i) * 8);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = 4 * (begin + i) + 2 * r;
      *reinterpret_cast<float2*>(to + (begin + i) * 8) =
          make_float2(o[at] * factor + old[i].x * before, o[at + 1] * factor + old[i].y * before);
    }
  }
}

// Writes the thread's share of two rows of the result, or of a split's partial, or merges it with
// the result that is already there. `o` may have more outputs than the value has dimensions.
template <int kValueDim, int kOutputs, typename Softmax>
__device__ __forceinline__ void StoreRows(const PrefillKernelArgs& args, const PrefillItem& item,
                                          int row, const Softmax& softmax,
                                          const float (&o)[kOutputs]) {
  static_assert(kValueDim % 8 == 0 && kOutputs >= kValueDim / 2);
  const int kv_head = args.KvHead(item.head);
  const float v_scale = args.v_scale == nullptr ? 1.0f : __ldg(args.v_scale + kv_head);
  const int lane = threadIdx.x % 32;
  const bool whole = item.split < 0;
  const bool f32 = !whole || args.o_dtype == DType::kF32;
  void* const all_o = whole ? args.o : args.partial_o;
  float* const all_lse = whole ? args.lse : args.partial_lse;
  const int first_row =
      item.row_begin + (whole ? 0 : item.split * args.partial_rows - args.partial_row_begin);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = softmax.Sum(r);
    const int in_item = row + 8 * r;
    const bool mine = in_item < item.row_count;
    const size_t at = size_t(first_row + in_item) * args.head_count + item.head - args.head_begin;
    float lse = softmax.Lse(r, sum);
    float factor = sum == 0.0f ? 0.0f : v_scale / sum;
    float before = 0.0f;
    if (item.accumulate && mine) {
      const MergeWeights<float> weights = Merge(all_lse[at], lse);
      before = weights.a;
      factor *= weights.b;
      lse = weights.lse;
    }
    __syncwarp();  // all lanes of the row have read its LSE
    if (!mine) continue;
    if (lane % 4 == 0) all_lse[at] = lse;
    const size_t first = at * kValueDim + lane % 4 * 2;
    if (f32) {
      StoreRow<kValueDim>(static_cast<float*>(all_o) + first, r, factor, item.accumulate != 0,
                          before, o);
      continue;
    }
#pragma unroll
    for (int tile = 0; tile < kValueDim / 8; ++tile) {
      const float x = o[4 * tile + 2 * r] * factor;
      const float y = o[4 * tile + 2 * r + 1] * factor;
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(all_o) + first + tile * 8) =
          args.o_dtype == DType::kBf16 ? Pack<DType::kBf16>(x, y) : Pack<DType::kF16>(x, y);
    }
  }
}

}  // namespace tributary::cuda
