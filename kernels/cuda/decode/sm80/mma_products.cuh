// The two products of mma_attention and the softmax between them, in a warp's registers.
//
//   S^T = K Q^T      slots in M, packed rows in N: with 8 packed rows nothing is padded
//   O^T += V^T P^T   dimensions in M; P^T is S^T transposed back in registers (movmatrix)
#pragma once

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/hidden_values.cuh"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/decode/sm80/mma_strips.cuh"
#include "kernels/cuda/decode/sm80/mma_traits.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// The operands of the products of a step with a strip's keys: a[i] is the i-th of two of depth 16.
template <typename Traits>
__device__ __forceinline__ void WidenKeys(const KeyStrip<Traits>& k, int step,
                                          uint32_t (&a)[2][4]) {
  constexpr DType kKv = Traits::kKv;
  if constexpr (Traits::kHasTail) {
    if (step == Traits::kFullSteps) {
      // A lane has eight bytes of either row: two quads of elements, or, in 16 bits, one.
      constexpr int kQuads = Traits::kQuadsPerVector / 2;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        WidenQuad<kKv>(k.tail, i, a[i][0], a[i][2]);
        WidenQuad<kKv>(k.tail, kQuads + i, a[i][1], a[i][3]);
      }
      return;
    }
  }
  const uint4(&panel)[2] = k.panels[step / Traits::kStepsPerPanel];
  const int quad = step % Traits::kStepsPerPanel * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    WidenQuad<kKv>(panel[0], quad + i, a[i][0], a[i][2]);
    WidenQuad<kKv>(panel[1], quad + i, a[i][1], a[i][3]);
  }
}

template <OfNvfp4 Traits>
__device__ __forceinline__ void WidenKeys(const KeyStrip<Traits>& k, int step,
                                          uint32_t (&a)[2][4]) {
  k.Widen(step, a);
}

// The operand of a product with tile j of 16 dimensions of a strip's i-th vectors of values.
template <typename Traits>
__device__ __forceinline__ void WidenValues(const ValueStrip<Traits>& v, int i, int j,
                                            uint32_t (&a)[4]) {
  WidenQuad<Traits::kKv>(v.vectors[i], 2 * j, a[0], a[2]);
  WidenQuad<Traits::kKv>(v.vectors[i], 2 * j + 1, a[1], a[3]);
}
template <OfNvfp4 Traits>
__device__ __forceinline__ void WidenValues(const ValueStrip<Traits>& v, int i, int j,
                                            uint32_t (&a)[4]) {
  const uint32_t words[4] = {v.vectors[i].x, v.vectors[i].y, v.vectors[i].z, v.vectors[i].w};
  WidenValueWord(words[j], v.scales[i], a);
}

// S^T of the strips: s[strip][tile] holds rows lane / 4 and lane / 4 + 8 of packed rows 2 * (lane %
// 4)
// + {0, 1}.
template <typename Traits>
__device__ __forceinline__ void Scores(const KeyStrip<Traits> (&k)[Traits::kStrips],
                                       const typename Traits::Shared& shared,
                                       float (&s)[Traits::kStrips][Traits::kRowTiles][4]) {
  const int lane = threadIdx.x % 32;
  // What would be one chain of additions is two, half as long.
  constexpr bool kTwoChains = Traits::kStrips * Traits::kRowTiles == 1;
  float odd[4] = {};
#pragma unroll
  for (int g = 0; g < Traits::kStrips; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][tile][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    const bool whole = step < Traits::kFullSteps || Traits::kLastStepWhole;  // two products
#pragma unroll
    for (int g = 0; g < Traits::kStrips; ++g) {
      uint32_t a[2][4];
      WidenKeys<Traits>(k[g], step, a);
#pragma unroll
      for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
        const uint4 q = shared.q[tile][step][lane];
        Mma16x8x16<Traits::kCompute>(s[g][tile], a[0], q.x, q.y);
        if (whole) {
          Mma16x8x16<Traits::kCompute>(kTwoChains ? odd : s[g][tile], a[1], q.z, q.w);
        }
      }
    }
  }
  if constexpr (kTwoChains) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][0][i] += odd[i];
  }
}

// What is not finite of a strip's values, in slot `slot`, of the i-th vectors' dimension `quad`; 0
// if that is finite. Of NVFP4 that is a block's scale. Called by a whole warp.
template <typename Traits>
__device__ __forceinline__ float NonFiniteValue(const ValueStrip<Traits>& v, int i, int quad,
                                                int slot) {
  const uint32_t words[4] = {v.vectors[i].x, v.vectors[i].y, v.vectors[i].z, v.vectors[i].w};
  return Traits::kElementBytes == 1
             ? NonFiniteOfSlot<Traits::kKv>(words[quad % 4], words[quad % 4], slot)
             : NonFiniteOfSlot<Traits::kKv>(words[quad % 2 * 2], words[quad % 2 * 2 + 1], slot);
}
template <OfNvfp4 Traits>
__device__ __forceinline__ float NonFiniteValue(const ValueStrip<Traits>& v, int i, int, int slot) {
  return NonFiniteOfSlot<DType::kFp8E4M3>(v.scales[i], v.scales[i], slot);
}

// Whether a warp has values in a strip that are not finite.
template <typename Traits>
__device__ __forceinline__ bool AnyNonFinite(const ValueStrip<Traits>& v) {
  NonFiniteSearch<Traits::kKv> search;
#pragma unroll
  for (const uint4& x : v.vectors) search.Look(x);
  return __any_sync(0xffffffffu, search.Found());
}
template <OfNvfp4 Traits>
__device__ __forceinline__ bool AnyNonFinite(const ValueStrip<Traits>& v) {
  NonFiniteSearch<DType::kFp8E4M3> search;
#pragma unroll
  for (int i = 0; i < Traits::kValueVectors; ++i) search.Look(v.scales[i], i);
  return __any_sync(0xffffffffu, search.Found());
}

template <typename Traits>
__device__ __forceinline__ void TakeOutNonFinite(ValueStrip<Traits>& v) {
#pragma unroll
  for (uint4& x : v.vectors) x = FiniteOnly<Traits::kKv>(x);
}
template <OfNvfp4 Traits>
__device__ __forceinline__ void TakeOutNonFinite(ValueStrip<Traits>& v) {
#pragma unroll
  for (uint32_t& x : v.scales) x &= ~NonFiniteMask<DType::kFp8E4M3>(x);
}

// A warp's share of the softmax and the output.
template <typename Traits>
struct Accumulator {
  float o[Traits::kDimTiles][Traits::kRowTiles][4];
  float reference[Traits::kRowTiles][2];
  float sum[Traits::kRowTiles][2];  // over this thread's rows only
  bool is_empty;                    // nothing has been added to o yet: it need not be rescaled

  __device__ void Reset() {
    is_empty = true;
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
      reference[tile][0] = reference[tile][1] = kNoReference;
      sum[tile][0] = sum[tile][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[d][tile][i] = 0.0f;
      }
    }
  }

  // Turns logits into weights, in place.
  __device__ void Weigh(float (&s)[Traits::kStrips][Traits::kRowTiles][4]) {
    float excess = 0.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        excess = fmaxf(excess, Largest(s, tile, c) - reference[tile][c]);
      }
    }
    if (__any_sync(0xffffffffu, excess > Traits::kLargest)) RaiseReference(s);
#pragma unroll
    for (int g = 0; g < Traits::kStrips; ++g) {
#pragma unroll
      for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[g][tile][i] = Exp2(s[g][tile][i] - reference[tile][i % 2]);
          sum[tile][i % 2] += s[g][tile][i];
        }
      }
    }
  }

  // This thread's largest logit of a packed row.
  static __device__ float Largest(const float (&s)[Traits::kStrips][Traits::kRowTiles][4], int tile,
                                  int c) {
    float largest = fmaxf(s[0][tile][c], s[0][tile][c + 2]);
#pragma unroll
    for (int g = 1; g < Traits::kStrips; ++g) {
      largest = fmaxf(largest, fmaxf(s[g][tile][c], s[g][tile][c + 2]));
    }
    return largest;
  }

  // Moves the references up to what the largest logits so far ask for, and with them what was
  // summed.
  __device__ void RaiseReference(const float (&s)[Traits::kStrips][Traits::kRowTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float raised = fmaxf(reference[tile][c], Largest(s, tile, c) - Traits::kBelow);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, mask));
        }
        const float factor = Exp2(reference[tile][c] - raised);
        reference[tile][c] = raised;
        sum[tile][c] *= factor;
        if (!Traits::kRegistersAreScarce && is_empty) continue;
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d) {
          o[d][tile][c] *= factor;
          o[d][tile][c + 2] *= factor;
        }
      }
    }
  }

  __device__ void AddValues(const ValueStrip<Traits>& v, const float (&p)[Traits::kRowTiles][4]) {
    is_empty = false;
    uint32_t b[Traits::kRowTiles][2];
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
      b[tile][0] = TransposeTile(Pack<Traits::kCompute>(p[tile][0], p[tile][1]));
      b[tile][1] = TransposeTile(Pack<Traits::kCompute>(p[tile][2], p[tile][3]));
    }
#pragma unroll
    for (int i = 0; i < Traits::kValueVectors; ++i) {
#pragma unroll
      for (int j = 0; j < Traits::kTilesPerVector; ++j) {
        uint32_t a[4];
        WidenValues<Traits>(v, i, j, a);
#pragma unroll
        for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
          Mma16x8x16<Traits::kCompute>(o[i * Traits::kTilesPerVector + j][tile], a, b[tile][0],
                                       b[tile][1]);
        }
      }
    }
  }

  // Adds what is not finite among a strip's values to the packed rows that see it, and takes it out
  // of the values.
  __device__ void ConfineValues(const PackedRowState<Traits::kTileRows>& packed_rows, int strip,
                                ValueStrip<Traits>& v) {
#pragma unroll 1
    for (int slot = 0; slot < kStripSlots; ++slot) {
      bool sees[Traits::kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          sees[tile][c] = Sees(packed_rows.keys[tile * 8 + threadIdx.x % 4 * 2 + c],
                               strip * kStripSlots + slot);
        }
      }
#pragma unroll
      for (int i = 0; i < Traits::kValueVectors; ++i) {
#pragma unroll
        for (int j = 0; j < Traits::kTilesPerVector; ++j) {
#pragma unroll
          for (int d = 0; d < 2; ++d) {
            const float x = NonFiniteValue<Traits>(v, i, 2 * j + d, slot);
#pragma unroll
            for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                if (sees[tile][c]) o[i * Traits::kTilesPerVector + j][tile][2 * d + c] += x;
              }
            }
          }
        }
      }
    }
    TakeOutNonFinite<Traits>(v);
  }
};

// From raw products to logits in base 2.
template <typename Traits>
__device__ __forceinline__ void ScaleScores(const AttentionArgs& args,
                                            const float (&scale)[Traits::kRowTiles][2],
                                            float (&s)[Traits::kStrips][Traits::kRowTiles][4]) {
#pragma unroll
  for (int g = 0; g < Traits::kStrips; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[g][tile][i] *= scale[tile][i % 2];
    }
  }
  if (args.soft_cap <= 0.0f) return;
#pragma unroll
  for (int g = 0; g < Traits::kStrips; ++g) {
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) CapLogits(args.soft_cap, s[g][tile]);
  }
}

// Sets the logits of keys that their packed row may not see, or behind the item's end, to -inf.
template <typename Traits>
__device__ __forceinline__ void MaskScores(const WorkItem& item,
                                           const PackedRowState<Traits::kTileRows>& packed_rows,
                                           int strip, float (&s)[Traits::kRowTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int first = strip * kStripSlots + TokenOfRow(lane / 4);
  const bool missing = Traits::kStrips > 1 && strip >= item.strip_end;
#pragma unroll
  for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const RowKeys keys = packed_rows.keys[tile * 8 + lane % 4 * 2 + c];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = first + 2 * i;
        if (slot < keys.begin || slot >= keys.end || missing)
          s[tile][2 * i + c] = EmptyLse<float>();
      }
    }
  }
}

// Dead slots may hold anything, NaN included, and 0 * NaN is NaN.
template <typename Traits>
__device__ __forceinline__ void ClearDeadValues(const WorkItem& item, int strip,
                                                ValueStrip<Traits>& v) {
  const uint32_t alive = AliveTokens(item, strip * kStripSlots + threadIdx.x % 4 * kQuadTokens);
  if constexpr (OfNvfp4<Traits>) {
    KeepTokens<DType::kFp8E4M3>(v.scales, alive);
  } else {
#pragma unroll
    for (int i = 0; i < Traits::kValueVectors; ++i) KeepTokens<Traits::kKv>(v.vectors[i], alive);
  }
}

}  // namespace tributary::cuda
