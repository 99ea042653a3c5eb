#include <string>

#include "kernels/cuda/append/load_dims.cuh"
#include "kernels/cuda/append/matches_cache.h"
#include "kernels/cuda/append/nvfp4_blocks.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/layout/plane_address.cuh"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/status.h"
#include "kernels/params.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;

// Compares four dimensions at a time: four lie together everywhere in a page.
template <DType kKv>
__device__ __forceinline__ bool SameKey(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                        const float (&x)[kTokenDims]) {
  constexpr int kWords = kTokenDims * int(SizeOf(kKv)) / 4;
  uint32_t words[kWords];
  EncodeWords<kKv>(x, words);
  bool same = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto* held =
        reinterpret_cast<const uint32_t*>(address.Key(slot, d + half * kTokenDims / 2));
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) same &= held[i] == words[half * kWords / 2 + i];
  }
  return same;
}

template <DType kKv>
__device__ __forceinline__ bool SameValue(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                          const float (&x)[kTokenDims]) {
  bool same = true;
#pragma unroll
  for (int i = 0; i < kTokenDims; ++i) {
    const std::byte* held = address.Value(slot, d + i);
    const uint32_t bits = SizeOf(kKv) == 1 ? *reinterpret_cast<const uint8_t*>(held)
                                           : *reinterpret_cast<const uint16_t*>(held);
    same &= bits == Encode<kKv>(x[i]);
  }
  return same;
}

// Half of a block; the thread's neighbour has the other half.
__device__ __forceinline__ Nvfp4Codes Quantized(const float* scales, int head,
                                                const float (&x)[kTokenDims]) {
  const float scale = scales == nullptr ? 1.0f : __ldg(scales + head);
  return QuantizeBlock(x, scale, PairOfLanes(1), 1);
}

// Threads per head of a token: those that the wider of keys and values needs.
__host__ __device__ constexpr int ThreadsOfHead(const KvGeometry& g) {
  return (g.key_dim > g.value_dim ? g.key_dim : g.value_dim) / kTokenDims;
}

// A thread takes 8 dimensions of a head of a token.
template <DType kKv>
__global__ void __launch_bounds__(kThreads)
    MatchesCacheKernel(const __grid_constant__ AppendArgs args,
                       const int32_t* __restrict__ entry_of_token, uint32_t* differs) {
  const KvGeometry& g = args.geometry;
  const int of_head = ThreadsOfHead(g);
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t token = unit / of_head / g.kv_heads;
  if (token >= args.tokens) return;
  const int64_t slot = args.slots[token];
  if (slot < 0) return;
  const int head = static_cast<int>(unit / of_head % g.kv_heads);
  const int d = static_cast<int>(unit % of_head) * kTokenDims;
  const size_t row = size_t(token) * g.kv_heads + head;
  float k[kTokenDims] = {};
  float v[kTokenDims] = {};
  const bool has_keys = d < g.key_dim;
  const bool has_values = d < g.value_dim;
  if (has_keys) LoadDims(args.input_dtype, args.k, row * g.key_dim + d, k);
  if (has_values) LoadDims(args.input_dtype, args.v, row * g.value_dim + d, v);
  bool same = true;
  if constexpr (kKv == DType::kNvfp4) {
    const Nvfp4Address held(args, head);
    if (has_keys) same &= held.HoldsKey(slot, d, Quantized(args.k_scale, head, k));
    if (has_values) same &= held.HoldsValue(slot, d, Quantized(args.v_scale, head, v));
  } else {
    const PlaneAddress<kKv> address{args, head};
    Unscale(args.k_scale, head, k);
    Unscale(args.v_scale, head, v);
    if (has_keys) same &= SameKey<kKv>(address, slot, d, k);
    if (has_values) same &= SameValue<kKv>(address, slot, d, v);
  }
  // (Every thread that stores here stores 1.)
  if (!same) differs[entry_of_token[token]] = 1;
}

}  // namespace

Status LaunchMatchesCache(const AppendArgs& args, const int32_t* entry_of_token, uint32_t* differs,
                          cudaStream_t stream) {
  if (!IsUnscaled(args.input_dtype)) {
    return Unsupported(std::string("input_dtype: ") + Name(args.input_dtype) +
                       " is not f32, bf16 or f16");
  }
  if (args.tokens < 0) return InvalidArgument("tokens: must not be negative");
  if (args.tokens == 0) return Status::Ok();
  const KvGeometry& g = args.geometry;
  const int64_t units = int64_t{args.tokens} * g.kv_heads * ThreadsOfHead(g);
  const auto blocks = static_cast<unsigned>((units + kThreads - 1) / kThreads);
  return DispatchKvType(g.dtype, [&](auto kv) {
    return DispatchHeadDims<&HeadDims::append>(g.key_dim, g.value_dim, [&](auto, auto) {
      MatchesCacheKernel<kv()><<<blocks, kThreads, 0, stream>>>(args, entry_of_token, differs);
      return CudaStatus(cudaGetLastError(), "matches_cache kernel");
    });
  });
}

}  // namespace tributary::cuda
