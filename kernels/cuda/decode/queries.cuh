// What the decode kernels do with the queries of a query tile before they attend: bring them to
// shared memory, in the type that products are computed in.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/decode/attention_args.h"
#include "kernels/cuda/decode/packed_rows.cuh"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {

// A power of two and its inverse.
struct PowerOfTwo {
  float value;
  float inverse;
};

// The power of two that brings the largest of a query's elements just below 2^kBits.
template <int kBits>
__device__ __forceinline__ PowerOfTwo QueryNormaliser(float max_abs) {
  const int exponent = static_cast<int>(__float_as_uint(max_abs) >> 23);  // biased
  if (max_abs == 0.0f || exponent == 255)
    return {1.0f, 1.0f};  // nothing to do, or infinite, or NaN
  const int clamped = max(exponent, kBits);
  return {__uint_as_float(uint32_t(253 + kBits - clamped) << 23),
          __uint_as_float(uint32_t(clamped - kBits + 1) << 23)};
}

// The same for e4m3, whose largest number is 448: one scale per query. A query with an element that
// is not finite becomes NaN, because e4m3 would make a finite number of it.
__device__ __forceinline__ PowerOfTwo Fp8QueryNormaliser(float max_abs) {
  const PowerOfTwo normaliser = QueryNormaliser<8>(max_abs);
  return {max_abs < INFINITY ? normaliser.value : NAN, normaliser.inverse};
}

// Eight elements of a query as floats.
__device__ __forceinline__ void QueryToFloat(DType type, const uint4 (&raw)[2], float (&x)[8]) {
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

// How many lanes share a query, eight elements each. It is a power of two, so that a query never
// lies in two warps; lanes behind the last element hold zeros.
constexpr int QueryLanes(int key_dim) {
  int lanes = 1;
  while (lanes * 8 < key_dim) lanes *= 2;
  return lanes;
}

// The largest magnitude in a query, which kLanes neighbouring lanes hold, eight elements each.
template <int kLanes>
__device__ __forceinline__ float LargestOfQuery(const float (&x)[8]) {
  float max_abs = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) max_abs = fmaxf(max_abs, fabsf(x[e]));
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) {
    max_abs = fmaxf(max_abs, __shfl_xor_sync(0xffffffffu, max_abs, lane));
  }
  return max_abs;
}

// What sums of products with keys are multiplied by, as the keys were widened.
template <DType kKv>
__device__ __forceinline__ float KeyScale(const AttentionArgs& args, const WorkItem& item) {
  return ElementUnit(kKv) * (args.k_scale == nullptr ? 1.0f : __ldg(args.k_scale + item.kv_head));
}

// Whether queries are rounded to e4m3; with caches of other types no code is spent on it.
template <DType kKv>
__device__ __forceinline__ bool RoundsQueries(const AttentionArgs& args) {
  return IsFp8(kKv) && args.fp8_queries;
}

// Eight elements rounded to e4m3, as f16.
__device__ __forceinline__ uint4 RoundToE4M3(const float (&x)[8]) {
  return make_uint4(WidenE4M3<false>(PackE4M3(x[0], x[1])), WidenE4M3<false>(PackE4M3(x[2], x[3])),
                    WidenE4M3<false>(PackE4M3(x[4], x[5])), WidenE4M3<false>(PackE4M3(x[6], x[7])));
}

// Eight elements of a query in the type that products with a cache of kKv are computed in. kLanes
// neighbouring lanes hold the whole query. `scale` is multiplied by what undoes the normalisation.
template <DType kKv, int kLanes>
__device__ __forceinline__ uint4 PackQuery(const AttentionArgs& args, const uint4 (&raw)[2],
                                           float& scale) {
  constexpr DType kCompute = ComputeType(kKv);
  const bool to_fp8 = RoundsQueries<kKv>(args);
  float x[8];
  QueryToFloat(args.q_dtype, raw, x);
  if (kCompute == DType::kF16 && (to_fp8 || args.q_dtype != DType::kF16)) {
    const float max_abs = LargestOfQuery<kLanes>(x);
    // f16 then neither overflows nor loses small elements, whatever the range of the query.
    const PowerOfTwo normaliser =
        to_fp8 ? Fp8QueryNormaliser(max_abs) : QueryNormaliser<14>(max_abs);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= normaliser.value;
    scale *= normaliser.inverse;
  }
  if (to_fp8) return RoundToE4M3(x);
  return make_uint4(Pack<kCompute>(x[0], x[1]), Pack<kCompute>(x[2], x[3]),
                    Pack<kCompute>(x[4], x[5]), Pack<kCompute>(x[6], x[7]));
}

// Brings the queries of a query tile from global to shared memory, in the compute type, in two
// halves, so that other work can be done in between. Packed rows beyond the item's are zero, and so
// are the dimensions from kKeyDim to kStagedDims, which are padding in the keys.
template <DType kKv, int kKeyDim, int kStagedDims, int kTileRows, int kThreads>
class QueryStager {
 public:
  // Asks L2 for what Load will read.
  __device__ void Prefetch(const AttentionArgs& args, const WorkItem& item) {
#pragma unroll 1
    for (int unit = threadIdx.x; unit < item.packed_count * kVectors; unit += kThreads) {
      PrefetchToL2(Source(args, item, unit / kVectors, unit % kVectors));
      if (unit % kVectors == 0) PrefetchToL2(args.keys + item.row_begin);
    }
  }

  __device__ void Load(const AttentionArgs& args, const WorkItem& item) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      raw_[i][0] = raw_[i][1] = make_uint4(0, 0, 0, 0);
      keys_[i] = {0, 0};
      if (unit / kLanes >= item.packed_count) continue;
      if (kVectors < kLanes && unit % kLanes >= kVectors) continue;
      const uint4* from = Source(args, item, unit / kLanes, unit % kLanes);
      raw_[i][0] = *from;
      if (args.q_dtype == DType::kF32) raw_[i][1] = from[1];
      keys_[i] = args.keys[item.row_begin + QueryRowOf(args, item, unit / kLanes)];
    }
    k_scale_ = KeyScale<kKv>(args, item);
  }

  // store(packed_row, vector, x) takes dimensions [8 * vector, 8 * vector + 8) of a packed row.
  template <typename Store>
  __device__ void Finish(const AttentionArgs& args, PackedRowState<kTileRows>& state, Store store) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      if (unit >= kTileRows * kLanes) return;  // the same for all lanes of a warp
      const int packed_row = unit / kLanes;
      float scale = args.sm_scale * k_scale_;
      const uint4 x = PackQuery<kKv, kLanes>(args, raw_[i], scale);
      if (kStagedDims == 8 * kLanes || unit % kLanes < kStagedDims / 8) {
        store(packed_row, unit % kLanes, x);
      }
      if (unit % kLanes == 0) {
        state.scale[packed_row] =
            args.soft_cap > 0.0f ? __fdividef(scale, args.soft_cap) : scale * kLog2E;
        state.keys[packed_row] = keys_[i];
      }
    }
  }

 private:
  static_assert(kKeyDim % 8 == 0 && kStagedDims % 8 == 0 && kStagedDims >= kKeyDim);
  static constexpr int kVectors = kKeyDim / 8;  // of a query
  static constexpr int kLanes = QueryLanes(kStagedDims);
  static constexpr int kOfThread = (kTileRows * kLanes + kThreads - 1) / kThreads;
  static_assert(kLanes <= 32);

  static __device__ const uint4* Source(const AttentionArgs& args, const WorkItem& item,
                                        int packed_row, int vector) {
    const size_t element = OutputIndex(args, item, packed_row) * kKeyDim + vector * 8;
    // Queries are f32, bf16 or f16. (SizeOf knows more types, and of a type that is not a constant
    // takes 0.03 us at the begin of every launch.)
    const size_t bytes = args.q_dtype == DType::kF32 ? 4 : 2;
    return reinterpret_cast<const uint4*>(static_cast<const std::byte*>(args.q) + element * bytes);
  }

  uint4 raw_[kOfThread][2];
  RowKeys keys_[kOfThread];
  float k_scale_ = 1.0f;
};

// The same through shared memory, for tiles of many packed rows: `raw` takes the queries as they
// come, at a place of its own for every thread. Keeping them in registers would be more code than
// there is time to fetch.
template <DType kKv, int kKeyDim, int kStagedDims, int kTileRows, int kThreads>
class QueryCopier {
 public:
  // The bytes that `raw` has room for.
  static constexpr int kRawBytes = kTileRows * QueryLanes(kStagedDims) * 8 * 4;

  // Asks L2 for what Ask will read.
  __device__ void Prefetch(const AttentionArgs& args, const WorkItem& item) {
    const int bytes = kKeyDim * static_cast<int>(SizeOf(args.q_dtype));
    const int lines = kKeyDim % 32 == 0 ? bytes / 64 : (bytes + 63) / 64;
#pragma unroll 1
    for (int unit = threadIdx.x; unit < item.packed_count * lines; unit += kThreads) {
      PrefetchToL2(static_cast<const std::byte*>(args.q) +
                   OutputIndex(args, item, unit / lines) * bytes + unit % lines * 64);
    }
    if (threadIdx.x < item.packed_count) {
      PrefetchToL2(args.keys + item.row_begin + QueryRowOf(args, item, threadIdx.x));
    }
  }

  // Begins to copy; WaitForCopies ends it. Packed rows beyond the item's are zero. (Without
  // branches: with them the compiler no longer takes it that a warp stays together, and so keeps
  // the descriptors of products and the addresses of barriers in registers of each thread.)
  __device__ void Ask(const AttentionArgs& args, const WorkItem& item, std::byte* raw,
                      PackedRowState<kTileRows>& state) {
    const int bytes = static_cast<int>(SizeOf(args.q_dtype)) * 8;  // of a vector: 16 or 32
    // Where the warp's packed rows are: each lane finds it for one of them.
    const int lane = threadIdx.x % 32;
    const int own = lane % kOfWarp / kAtOnce * (kThreads / kLanes) +
                    static_cast<int>(threadIdx.x) / 32 * kAtOnce + lane % kAtOnce;
    const int own_index =
        own < item.packed_count ? static_cast<int>(OutputIndex(args, item, own)) : -1;
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      const int index = __shfl_sync(0xffffffffu, own_index, i * kAtOnce + lane / kLanes);
      const bool alive = index >= 0 && (kVectors == kLanes || unit % kLanes < kVectors);
      const std::byte* from = static_cast<const std::byte*>(args.q) +
                              (size_t(max(index, 0)) * kVectors + unit % kLanes) * bytes;
      CopyAsync16OrZero(raw + unit * bytes, from, alive);
      if (bytes == 32) CopyAsync16OrZero(raw + unit * bytes + 16, from + 16, alive);
    }
    if (threadIdx.x < kTileRows) {
      const bool alive = threadIdx.x < item.packed_count;
      const int row = alive ? QueryRowOf(args, item, threadIdx.x) : 0;
      CopyAsync8OrZero(&state.keys[threadIdx.x], args.keys + item.row_begin + row, alive);
    }
    k_scale_ = KeyScale<kKv>(args, item);
  }

  // store(packed_row, vector, x) takes dimensions [8 * vector, 8 * vector + 8) of a packed row;
  // those from kKeyDim to kStagedDims are zero.
  template <typename Store>
  __device__ void Finish(const AttentionArgs& args, const std::byte* raw,
                         PackedRowState<kTileRows>& state, Store store) {
    const int bytes = static_cast<int>(SizeOf(args.q_dtype)) * 8;
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      const int unit = i * kThreads + threadIdx.x;
      const int packed_row = unit / kLanes;
      const auto* from = reinterpret_cast<const uint4*>(raw + unit * bytes);
      uint4 words[2] = {from[0]};
      if (bytes == 32) words[1] = from[1];
      float scale = args.sm_scale * k_scale_;
      const bool as_computed = args.q_dtype == ComputeType(kKv) && !RoundsQueries<kKv>(args);
      const uint4 x = as_computed ? words[0] : PackQuery<kKv, kLanes>(args, words, scale);
      if (kStagedDims == 8 * kLanes || unit % kLanes < kStagedDims / 8) {
        store(packed_row, unit % kLanes, x);
      }
      if (unit % kLanes == 0) {
        state.scale[packed_row] =
            args.soft_cap > 0.0f ? __fdividef(scale, args.soft_cap) : scale * kLog2E;
      }
    }
  }

 private:
  static_assert(kKeyDim % 8 == 0 && kStagedDims % 8 == 0 && kStagedDims >= kKeyDim);
  static constexpr int kVectors = kKeyDim / 8;  // of a query
  static constexpr int kLanes = QueryLanes(kStagedDims);
  static constexpr int kOfThread = kTileRows * kLanes / kThreads;
  static constexpr int kAtOnce = 32 / kLanes;  // packed rows of a warp
  static constexpr int kOfWarp = kAtOnce * kOfThread;
  static_assert(kLanes <= 32 && kOfThread * kThreads == kTileRows * kLanes && kOfWarp <= 32);

  float k_scale_ = 1.0f;
};

}  // namespace tributary::cuda
