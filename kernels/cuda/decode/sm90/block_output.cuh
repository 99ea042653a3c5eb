// What a thread block makes of the sums of its two warpgroups, and where the result goes.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm90/tile_source.cuh"
#include "kernels/cuda/plan/work_item.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/lse.h"

namespace tributary::cuda {

// What the warpgroups of a block found in a packed row.
struct PackedRowSum {
  float factors[kComputeWarpgroups];  // by these their outputs enter the normalised sum
  float lse2;                         // in base 2
};
struct PerWarpgroup {
  float of[kComputeWarpgroups];
};
__device__ __forceinline__ PackedRowSum SumOfWarpgroups(PerWarpgroup sums, PerWarpgroup references,
                                                        float v_scale, float bias) {
  float reference = kNoReference;
#pragma unroll
  for (const float r : references.of) reference = fmaxf(reference, r);
  PackedRowSum result;
  float sum = 0.0f;
#pragma unroll
  for (int g = 0; g < kComputeWarpgroups; ++g) {
    result.factors[g] = Exp2(references.of[g] - reference);
    sum += result.factors[g] * sums.of[g];
  }
  const float inverse = sum == 0.0f ? 0.0f : __fdividef(v_scale, sum);
#pragma unroll
  for (int g = 0; g < kComputeWarpgroups; ++g) result.factors[g] *= inverse;
  result.lse2 = sum == 0.0f ? EmptyLse<float>() : reference + __log2f(sum) - bias;
  return result;
}

// Where a packed row of a block's output goes: the row of O, or of the workspace when the job was
// cut; -1 for none.
struct OutputRow {
  int index;
  bool whole;
};
template <int kTileRows>
__device__ __forceinline__ OutputRow RowOfOutput(const AttentionArgs& args, const WorkItem& item,
                                                 int packed_row) {
  const bool whole = item.split_count == 1;
  if (packed_row >= item.packed_count) return {-1, whole};
  return {whole ? static_cast<int>(OutputIndex(args, item, packed_row))
                : (item.partial_begin + item.split_index) * kTileRows + packed_row,
          whole};
}
__device__ __forceinline__ void StoreLse(const AttentionArgs& args, OutputRow row, float lse2) {
  if (row.index < 0) return;
  StoreRelaxed((row.whole ? args.lse : args.partial_lse) + row.index,
               row.whole ? lse2 * kLn2 : lse2);
}

}  // namespace tributary::cuda
