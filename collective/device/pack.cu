#include <cuda_fp16.h>

#include <cmath>
#include <string>

#include "collective/device/pack.h"
#include "collective/exchange/head_slice.h"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"

namespace tributary::collective {
namespace {

constexpr int kThreads = 256;
constexpr int kDims = 8;  // of a thread

struct Place {
  size_t pair;     // among [rows, heads]
  int32_t part;    // that has the head
  size_t in_part;  // the pair's place in it
};

__device__ __forceinline__ Place PlaceOf(const PartsLayout& l, int64_t pair) {
  const int32_t row = static_cast<int32_t>(pair / l.heads);
  const int32_t head = static_cast<int32_t>(pair - static_cast<int64_t>(row) * l.heads);
  // The first `extra` parts have one head more.
  const int32_t base = l.heads / l.parts;
  const int32_t extra = l.heads % l.parts;
  const int32_t in_wide = extra * (base + 1);
  const int32_t part = head < in_wide ? head / (base + 1) : extra + (head - in_wide) / base;
  const HeadSlice slice = SliceOfRank(l.heads, l.parts, part);
  return {static_cast<size_t>(pair), part,
          static_cast<size_t>(row) * slice.count + (head - slice.begin)};
}

struct Dims {
  float x[kDims];
};

__device__ __forceinline__ Dims Load(const void* o, DType type, size_t element) {
  Dims d;
  if (type == DType::kF32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(o) + element);
    const float4 a = from[0], b = from[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(o) + element);
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (type == DType::kBf16) {
      d.x[2 * i] = __uint_as_float(w[i] << 16);
      d.x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
      d.x[2 * i] = pair.x;
      d.x[2 * i + 1] = pair.y;
    }
  }
  return d;
}

__device__ __forceinline__ void Store(void* o, DType type, size_t element, const Dims& d) {
  if (type == DType::kF32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(o) + element);
    to[0] = make_float4(d.x[0], d.x[1], d.x[2], d.x[3]);
    to[1] = make_float4(d.x[4], d.x[5], d.x[6], d.x[7]);
    return;
  }
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = type == DType::kBf16 ? cuda::Pack<DType::kBf16>(d.x[2 * i], d.x[2 * i + 1])
                                : cuda::Pack<DType::kF16>(d.x[2 * i], d.x[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(o) + element) =
      make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ std::byte* PartAt(const PartsLayout& l, const void* parts, int part) {
  return static_cast<std::byte*>(const_cast<void*>(parts)) + part * l.stride;
}
__device__ __forceinline__ float* LseOf(const PartsLayout& l, std::byte* part) {
  return reinterpret_cast<float*>(part + l.lse_offset);
}

// This rank's share in the weights of all ranks, and the LSE of the union.
__device__ __forceinline__ float WeightOf(const PackArgs& a, size_t pair, float* merged) {
  const size_t stride = static_cast<size_t>(a.layout.rows) * a.layout.heads;
  UnionLse<float> of_all;
  for (int r = 0; r < a.layout.parts; ++r) of_all.See(a.all_lse[r * stride + pair]);
  float own = 0.0f;
  for (int r = 0; r < a.layout.parts; ++r) {
    const float weight = of_all.WeightOf(a.all_lse[r * stride + pair]);
    if (r == a.rank) own = weight;
    of_all.Add(weight);
  }
  *merged = of_all.Lse();
  return of_all.ShareOf(own);
}

// Eight dimensions a thread.
__global__ void __launch_bounds__(kThreads) PackKernel(const __grid_constant__ PackArgs a) {
  const PartsLayout& l = a.layout;
  const int lanes = l.value_dim / kDims;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= int64_t{l.rows} * l.heads * lanes) return;
  const int d = static_cast<int>(unit % lanes) * kDims;
  const Place place = PlaceOf(l, unit / lanes);
  std::byte* part = PartAt(l, a.parts, place.part);
  float weight = 1.0f;
  if (a.all_lse != nullptr) {
    float merged;
    weight = WeightOf(a, place.pair, &merged);
    if (d == 0 && place.part == a.rank) a.merged_lse[place.in_part] = merged;
  } else if (d == 0) {
    LseOf(l, part)[place.in_part] = a.lse[place.pair];
  }
  Dims x = {};
  // A partial without weight is left out altogether: nothing is asked of its output.
  if (weight != 0.0f) {
    x = Load(a.o, a.o_dtype, place.pair * l.value_dim + d);
    if (a.all_lse != nullptr) {
#pragma unroll
      for (float& v : x.x) v *= weight;
    }
  }
  Store(part, l.type, place.in_part * l.value_dim + d, x);
}

__global__ void __launch_bounds__(kThreads)
    UnpackKernel(const PartsLayout l, const void* parts, void* o, float* lse) {
  const int lanes = l.value_dim / kDims;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (unit >= int64_t{l.rows} * l.heads * lanes) return;
  const int d = static_cast<int>(unit % lanes) * kDims;
  const Place place = PlaceOf(l, unit / lanes);
  std::byte* part = PartAt(l, parts, place.part);
  Store(o, l.type, place.pair * l.value_dim + d,
        Load(part, l.type, place.in_part * l.value_dim + d));
  if (d == 0 && lse != nullptr) lse[place.pair] = LseOf(l, part)[place.in_part];
}

unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

int64_t Units(const PartsLayout& l) { return int64_t{l.rows} * l.heads * (l.value_dim / kDims); }

size_t Aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

PartsLayout LayOutParts(int32_t rows, int32_t heads, int32_t value_dim, int32_t parts, DType type) {
  PartsLayout l{.rows = rows, .heads = heads, .value_dim = value_dim, .parts = parts, .type = type};
  const size_t pairs = static_cast<size_t>(rows) * SliceOfRank(heads, parts, 0).count;
  l.lse_offset = pairs * value_dim * SizeOf(type);
  l.stride = l.lse_offset + Aligned(pairs * sizeof(float));
  return l;
}

Status LaunchPack(const PackArgs& args, cudaStream_t stream) {
  PackKernel<<<Blocks(Units(args.layout)), kThreads, 0, stream>>>(args);
  return cuda::CudaStatus(cudaGetLastError(), "packing partials");
}

Status LaunchUnpack(const PartsLayout& layout, const void* parts, void* o, float* lse,
                    cudaStream_t stream) {
  UnpackKernel<<<Blocks(Units(layout)), kThreads, 0, stream>>>(layout, parts, o, lse);
  return cuda::CudaStatus(cudaGetLastError(), "unpacking slices");
}

Status LaunchPackSlice(const PartsLayout& layout, int32_t part, const void* o, const float* lse,
                       void* to, cudaStream_t stream) {
  const size_t pairs =
      static_cast<size_t>(layout.rows) * SliceOfRank(layout.heads, layout.parts, part).count;
  auto* bytes = static_cast<std::byte*>(to);
  cudaError_t e = cudaMemcpyAsync(bytes, o, pairs * layout.value_dim * SizeOf(layout.type),
                                  cudaMemcpyDeviceToDevice, stream);
  if (e == cudaSuccess && lse != nullptr) {
    e = cudaMemcpyAsync(bytes + layout.lse_offset, lse, pairs * sizeof(float),
                        cudaMemcpyDeviceToDevice, stream);
  }
  return cuda::CudaStatus(e, "packing a slice");
}

Status LoadPackKernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(PackKernel),
                                 reinterpret_cast<const void*>(UnpackKernel)};
  return cuda::LoadKernels(kernels, "the packing of partials");
}

}  // namespace tributary::collective
