// What both prefill kernels do with their rows: the softmax over a tile of raw products, and the
// result.
//
// A warp has 16 query rows. A thread holds, of every eight columns of a product, two neighbours of
// row lane / 4 and the same two of row lane / 4 + 8: so mma.sync and wgmma lay out accumulators.
//
// As in attention of few rows (columns.cuh), weights are taken against a reference that follows a
// row's maximum only when that exceeds it by 2^8: until then no value crosses a lane and the output
// need not be rescaled.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/columns.cuh"
#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

template <DType kCompute>
inline constexpr float kPrefillBias = kCompute == DType::kF16 ? kWeightBias : 0.0f;

template <DType kCompute, int kKeys>
class RowSoftmax {
 public:
  // `row` is the first of the thread's rows within the item, the second is row + 8.
  __device__ void Reset(const PrefillKernelArgs& args, const PrefillItem& item, int row) {
    const int kv_head = args.KvHead(item.head);
    const float k_scale = args.k_scale == nullptr ? 1.0f : __ldg(args.k_scale + kv_head);
    soft_cap_ = args.soft_cap;
    plain_ = soft_cap_ <= 0.0f && args.sm_scale * k_scale > 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference_[r] = kNoReference;
      sum_[r] = 0.0f;
      keys_[r] = {0, 0};
      scale_[r] = args.sm_scale * k_scale;
      const int in_item = row + 8 * r;
      if (in_item < item.row_count) {
        keys_[r] = args.keys[item.row_begin + in_item];
        if (args.q_scale != nullptr) {
          scale_[r] *=
              __ldg(args.q_scale + size_t(item.row_begin + in_item) * args.q_heads + item.head);
        }
      }
      scale_[r] = soft_cap_ > 0.0f ? scale_[r] / soft_cap_ : scale_[r] * kLog2E;
    }
  }

  // Turns the raw products with keys [first_key, first_key + kKeys) into weights. True when what
  // was weighed before must be multiplied by `factor`.
  __device__ bool Weigh(const PrefillItem& item, int first_key, float (&s)[kKeys / 2],
                        float (&factor)[2]) {
    const bool dense = first_key >= item.dense_begin && first_key + kKeys <= item.dense_end;
    float scale[2] = {scale_[0], scale_[1]};
    if (!dense || !plain_) {
      ToLogits(first_key, dense, s);
      scale[0] = scale[1] = 1.0f;
    }
    float peak[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) peak[RowOf(i)] = fmaxf(peak[RowOf(i)], s[i]);
    const bool exceeded = peak[0] * scale[0] - reference_[0] > kHeadroom ||
                          peak[1] * scale[1] - reference_[1] > kHeadroom;
    const bool raised = __any_sync(0xffffffffu, exceeded);
    if (raised) Raise(peak, scale, factor);
    const float offset[2] = {kPrefillBias<kCompute> - reference_[0],
                             kPrefillBias<kCompute> - reference_[1]};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = Exp2(fmaf(s[i], scale[RowOf(i)], offset[RowOf(i)]));
      sum_[RowOf(i)] += s[i];
    }
    return raised;
  }

  // The weights as operand A of the second product: four registers for every 16 keys.
  static __device__ void PackWeights(const float (&s)[kKeys / 2], uint32_t (&p)[kKeys / 4]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = Pack<kCompute>(s[2 * i], s[2 * i + 1]);
  }

  // The sum of row r's weights over all keys, in all lanes that share the row.
  __device__ float Sum(int r) const {
    float sum = sum_[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  }
  // LSE in base e of a row whose weights have this sum.
  __device__ float Lse(int r, float sum) const {
    if (sum == 0.0f) return EmptyLse<float>();
    return (reference_[r] - kPrefillBias<kCompute> + __log2f(sum)) * kLn2;
  }

 private:
  static constexpr __device__ int RowOf(int i) { return i / 2 % 2; }

  // Logits in base 2, -inf for keys outside a row's range.
  __device__ void ToLogits(int first_key, bool dense, float (&s)[kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= scale_[RowOf(i)];
    if (soft_cap_ > 0.0f) CapLogits(soft_cap_, s);
    if (dense) return;
    const int own = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = own + i / 4 * 8 + i % 2;
      if (key < keys_[RowOf(i)].begin || key >= keys_[RowOf(i)].end) s[i] = EmptyLse<float>();
    }
  }

  // Moves the references up to the maxima so far.
  __device__ void Raise(const float (&peak)[2], const float (&scale)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = peak[r] * scale[r];
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float raised = fmaxf(reference_[r], top);
      factor[r] = Exp2(reference_[r] - raised);
      sum_[r] *= factor[r];
      reference_[r] = raised;
    }
  }

  float reference_[2];
  float sum_[2];
  float scale_[2];  // from a raw product to a logit in base 2, or to what the soft cap takes
  RowKeys keys_[2];
  float soft_cap_;
  bool plain_;  // logits are the products times a positive scale
};

template <int kHeadDim>
__device__ __forceinline__ void ScaleRows(const float (&factor)[2], float (&o)[kHeadDim / 2]) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i / 2 % 2];
}

// Writes the thread's share of row r in f32, `before` times what is there added to it if asked for:
// that is read in few batches, since no load passes a store.
template <int kHeadDim>
__device__ __forceinline__ void StoreRow(float* to, int r, float factor, bool accumulate,
                                         float before, const float (&o)[kHeadDim / 2]) {
  constexpr int kBatch = kHeadDim == 64 ? 8 : 16;
#pragma unroll
  for (int begin = 0; begin < kHeadDim / 8; begin += kBatch) {
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

// Writes the thread's share of two rows of the result, or merges it with what is there.
template <int kHeadDim, typename Softmax>
__device__ __forceinline__ void StoreRows(const PrefillKernelArgs& args, const PrefillItem& item,
                                          int row, const Softmax& softmax,
                                          const float (&o)[kHeadDim / 2]) {
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
    const size_t first = at * kHeadDim + lane % 4 * 2;
    if (f32) {
      StoreRow<kHeadDim>(static_cast<float*>(all_o) + first, r, factor, item.accumulate != 0,
                         before, o);
      continue;
    }
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 8; ++tile) {
      const float x = o[4 * tile + 2 * r] * factor;
      const float y = o[4 * tile + 2 * r + 1] * factor;
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(all_o) + first + tile * 8) =
          args.o_dtype == DType::kBf16 ? Pack<DType::kBf16>(x, y) : Pack<DType::kF16>(x, y);
    }
  }
}

}  // namespace tributary::cuda
