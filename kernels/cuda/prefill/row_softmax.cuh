// The softmax of the prefill kernels: from raw products of one KV tile to weights, row by row.
//
// A warp owns 16 query rows. Of every eight columns of a product a thread holds two neighbours in
// row lane / 4 and the same two in row lane / 4 + 8: both mma.sync and wgmma lay out accumulators
// like this.
//
// Weights are taken against a reference that follows the largest logit of a row only when that
// exceeds it by 2^8, as in attention of few rows (packed_rows.cuh). Until then no value crosses a
// lane and the output need not be rescaled.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

// What is added to the exponent of every weight, and by how much the exponent of the largest logit
// may exceed the reference. Weights in f16 need the former (kWeightBias); bf16 has the range of
// fp32. In e4m3, whose largest number is 448, the reference follows more closely: the bits below it
// are few.
template <DType kCompute>
inline constexpr float kPrefillBias = kCompute == DType::kF16       ? kWeightBias
                                      : kCompute == DType::kFp8E4M3 ? 6.0f
                                                                    : 0.0f;
template <DType kCompute>
inline constexpr float kPrefillHeadroom = kCompute == DType::kFp8E4M3 ? 2.75f : kHeadroom;

// The state of two rows of one thread over an item's KV tiles of kKeys slots. kCompute is the type
// of the weights. Where it has eight bits, the keys of every 16 slots lie in the rows of the page's
// panels (KeyRow of layout/page_layout.h).
template <DType kCompute, int kKeys>
class RowSoftmax {
 public:
  // Begins an item. The thread's rows within it are `row` and row + 8.
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

  // Turns the raw products with keys [first_key, first_key + kKeys) into weights. Returns true when
  // the output of the tiles before must be multiplied by `factor`, one factor per row.
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
    constexpr float kMost = kPrefillHeadroom<kCompute>;
    const bool exceeded =
        peak[0] * scale[0] - reference_[0] > kMost || peak[1] * scale[1] - reference_[1] > kMost;
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

  // What the two rows see.
  __device__ const RowKeys (&keys() const)[2] { return keys_; }

  // Makes the weights operand A of the second product: four registers for every 16 keys, or for
  // every 32 in eight bits. There a register holds four consecutive slots of one row, which come
  // from two columns of eight.
  template <int kWords>
  static __device__ void PackWeights(const float (&s)[kKeys / 2], uint32_t (&p)[kWords]) {
    static_assert(kWords == kKeys / (kIsFp8 ? 8 : 4));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kIsFp8) {
        const int at = i / 2 * 8 + i % 2 * 2;
        p[i] = PackE4M3(s[at], s[at + 1]) | PackE4M3(s[at + 4], s[at + 5]) << 16;
      } else {
        p[i] = Pack<kCompute>(s[2 * i], s[2 * i + 1]);
      }
    }
  }

  // Returns the sum of row r's weights over all keys, to all four lanes that share the row.
  __device__ float Sum(int r) const {
    float sum = sum_[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  }
  // Returns the LSE, in base e, of row r, whose weights have this sum.
  __device__ float Lse(int r, float sum) const {
    if (sum == 0.0f) return EmptyLse<float>();
    return (reference_[r] - kPrefillBias<kCompute> + __log2f(sum)) * kLn2;
  }

 private:
  static constexpr bool kIsFp8 = kCompute == DType::kFp8E4M3;

  static constexpr __device__ int RowOf(int i) { return i / 2 % 2; }
  // The key of a product's column, counted from the first that the thread holds.
  static constexpr __device__ int KeyOf(int i) {
    return kIsFp8 ? i / 8 * 16 + i / 4 % 2 * 2 + i % 2 : i / 4 * 8 + i % 2;
  }

  // Logits in base 2, -inf for keys outside a row's range.
  __device__ void ToLogits(int first_key, bool dense, float (&s)[kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= scale_[RowOf(i)];
    if (soft_cap_ > 0.0f) CapLogits(soft_cap_, s);
    if (dense) return;
    const int own = first_key + threadIdx.x % 4 * (kIsFp8 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = own + KeyOf(i);
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
  bool plain_;  // logits are the raw products times a positive scale
};

}  // namespace tributary::cuda
