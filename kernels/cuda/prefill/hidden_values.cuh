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

// Adds what was taken out of the item's KV tiles of kKeys keys to the outputs of this thread's rows
// that see it. `keys`: what the two rows see. `o` is as StoreRows takes it (row_results.cuh).
template <DType kCompute, int kKeys, int kValueDim, int kOutputs>
__device__ __forceinline__ void AddHiddenValues(const PrefillKernelArgs& args,
                                                const PrefillItem& item, const RowKeys (&keys)[2],
                                                float (&o)[kOutputs]) {
  const auto* const values = static_cast<const uint16_t*>(args.v) +
                             args.KvHead(item.head) * kValueDim + threadIdx.x % 4 * 2;
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
      const auto* const words = reinterpret_cast<const uint32_t*>(
          values + static_cast<int64_t>(item.key_row + key) * args.kv_heads * kValueDim);
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i) {  // eight dimensions
        const uint32_t pair = words[i * 4];
        o[4 * i + 2 * r] += NonFiniteOrZero<kCompute>(pair, 0);
        o[4 * i + 2 * r + 1] += NonFiniteOrZero<kCompute>(pair, 1);
      }
    }
  }
}

}  // namespace tributary::cuda
