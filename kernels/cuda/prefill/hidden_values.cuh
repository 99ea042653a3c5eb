// Values that are infinite or NaN in keys that only some rows of a query tile see, or none.
//
// A product of weights and values takes every row of a query tile and every key of a KV tile. A row
// that does not see a key has no weight there, but 0 * NaN is NaN. Such a value leaves none of the
// outputs of its dimension finite, in any row of the query tile. So a kernel looks at the outputs
// of one of its rows when it has attended to an item. When one is not finite, and the item has KV
// tiles that are not dense, it attends to the item once more. This time it takes values that are
// not finite out of these tiles before it multiplies them. At the end it reads them from global
// memory and adds them to the rows that see them: without their weight, which changes nothing.
#pragma once

#include <cstdint>

#include "kernels/cuda/prefill/prefill_kernel_args.h"
#include "kernels/cuda/ptx/non_finite.cuh"

namespace tributary::cuda {

// Whether every row sees every key of `tiles` KV tiles of kKeys keys, the first of which begins
// with this key.
template <int kKeys>
__device__ __forceinline__ bool IsDense(const PrefillItem& item, int first_key, int tiles = 1) {
  return first_key >= item.dense_begin && first_key + tiles * kKeys <= item.dense_end;
}

// Whether an output of a thread's first row is not finite. `o` is as StoreRows takes it
// (row_results.cuh).
template <int kOutputs>
__device__ __forceinline__ bool HasNonFinite(const float (&o)[kOutputs]) {
  float sums[2] = {};  // zero times an output is zero, or NaN if it is not finite
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    sums[0] = fmaf(o[i], 0.0f, sums[0]);
    sums[1] = fmaf(o[i + 1], 0.0f, sums[1]);
  }
  return sums[0] + sums[1] != 0.0f;
}

// By kThreads threads, of which this is number `thread`: takes what is not finite out of a tile's
// values in shared memory.
template <DType kCompute, int kBytes, int kThreads>
__device__ __forceinline__ void KeepFinite(void* values, int thread) {
  static_assert(kBytes % 16 == 0);
  auto* const vectors = static_cast<uint4*>(values);
#pragma unroll 1
  for (int i = thread; i < kBytes / 16; i += kThreads) {
    vectors[i] = FiniteOnly<kCompute>(vectors[i]);
  }
}

// The values of one key and KV head in global memory, a pair of dimensions at a time: `row` is the
// key's row of dense values. In eight bits they lie transposed (KeptFp8::kKeysAndValues).
template <DType kCompute, int kKeys, int kValueDim>
class ValuesOfKey {
 public:
  __device__ ValuesOfKey(const PrefillKernelArgs& args, int kv_head, int64_t row) {
    const auto* const v = static_cast<const uint8_t*>(args.v);
    values_ = kIsFp8
                  ? v + ((row / kKeys * args.kv_heads + kv_head) * kValueDim * kKeys + row % kKeys)
                  : v + (row * args.kv_heads + kv_head) * kValueDim * 2;
  }
  // Dimensions d, which is even, and d + 1; the word's other bytes, if it has any, are zero.
  __device__ uint32_t Pair(int d) const {
    if constexpr (kIsFp8) return values_[d * kKeys] | values_[(d + 1) * kKeys] << 8;
    return *reinterpret_cast<const uint32_t*>(values_ + d * 2);
  }

 private:
  static constexpr bool kIsFp8 = IsFp8(kCompute);
  const uint8_t* values_;
};

// Adds what was taken out of the item's KV tiles of kKeys keys to the outputs of this thread's rows
// that see it. `keys`: what the two rows see. `o` is as StoreRows takes it (row_results.cuh).
template <DType kCompute, int kKeys, int kValueDim, int kOutputs>
__device__ __forceinline__ void AddHiddenValues(const PrefillKernelArgs& args,
                                                const PrefillItem& item, const RowKeys (&keys)[2],
                                                float (&o)[kOutputs]) {
  const int kv_head = args.KvHead(item.head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = min(keys[r].end, item.key_end);
#pragma unroll 1
    for (int key = max(keys[r].begin, item.key_begin); key < end; ++key) {
      const int tile = (key - item.key_begin) / kKeys;
      if (IsDense<kKeys>(item, item.key_begin + tile * kKeys)) {
        key = item.key_begin + (tile + 1) * kKeys - 1;
        continue;
      }
      const ValuesOfKey<kCompute, kKeys, kValueDim> values(args, kv_head, item.key_row + key);
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i) {  // eight dimensions
        const uint32_t pair = values.Pair(i * 8 + threadIdx.x % 4 * 2);
        o[4 * i + 2 * r] += NonFiniteOrZero<kCompute>(pair, 0);
        o[4 * i + 2 * r + 1] += NonFiniteOrZero<kCompute>(pair, 1);
      }
    }
  }
}

}  // namespace tributary::cuda
