// Tokens of an NVFP4 cache in plain order (plain_tokens.h): of each head the codes of its key,
// their block scales, and the same of its value. A byte has two codes, the first one low.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/append/append.h"
#include "kernels/cuda/append/load_dims.cuh"
#include "kernels/cuda/append/nvfp4_blocks.cuh"
#include "kernels/cuda/append/plain_tokens.h"

namespace tributary::cuda {

static_assert(kTokenDims == kNvfp4Dims);

// Which eight dimensions of a token are meant, of its heads' keys and values one after the other.
struct Nvfp4PlainPlace {
  int head;
  bool key;
  int d;
  size_t codes;  // bytes from the token's begin
  size_t scale;

  __device__ Nvfp4PlainPlace(const KvGeometry& g, int unit) {
    const int of_key = g.key_dim / kNvfp4Dims;
    const int of_head = of_key + g.value_dim / kNvfp4Dims;
    head = unit / of_head;
    key = unit % of_head < of_key;
    d = (unit % of_head - (key ? 0 : of_key)) * kNvfp4Dims;
    const size_t begin = static_cast<size_t>(head) * static_cast<size_t>(BytesPerTokenOfHead(g)) +
                         (key ? 0 : StoredKeyBytes(g));
    codes = begin + static_cast<size_t>(d) / 2;
    scale = begin + (key ? KeyBytes(g) : ValueBytes(g)) + static_cast<size_t>(d / kNvfp4Block);
  }
  static __device__ int Count(const KvGeometry& g) {
    return (g.key_dim + g.value_dim) / kNvfp4Dims * g.kv_heads;
  }
};

// Elements lie at any byte. Behind the token's last there are zeros.
__device__ __forceinline__ void StorePlain(const KvGeometry& g, std::byte* token,
                                           const Nvfp4PlainPlace& place, const Nvfp4Codes& x) {
#pragma unroll
  for (int i = 0; i < kNvfp4Dims / 2; ++i) {
    token[place.codes + i] = static_cast<std::byte>(x.codes >> 8 * i);
  }
  if (place.d % kNvfp4Block == 0) token[place.scale] = std::byte{x.scale};
  if (place.key || place.head < g.kv_heads - 1 || place.d + kNvfp4Dims < g.value_dim) return;
  const size_t end = static_cast<size_t>(g.kv_heads) * static_cast<size_t>(BytesPerTokenOfHead(g));
  for (size_t at = end; at < PlainTokenBytes(g); ++at) token[at] = std::byte{0};
}
__device__ __forceinline__ Nvfp4Codes LoadPlain(const std::byte* token,
                                                const Nvfp4PlainPlace& place) {
  Nvfp4Codes x;
#pragma unroll
  for (int i = 0; i < kNvfp4Dims / 2; ++i) {
    x.codes |= static_cast<uint32_t>(token[place.codes + i]) << 8 * i;
  }
  x.scale = static_cast<uint8_t>(token[place.scale]);
  return x;
}

// A thread takes half of a block, its neighbour the other half.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    AppendNvfp4PlainKernel(const __grid_constant__ AppendArgs args, const PlainPages to) {
  const KvGeometry& g = args.geometry;
  const int of_token = Nvfp4PlainPlace::Count(g);
  const int64_t units = int64_t{args.tokens} * of_token;
  for (int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x; unit < units;
       unit += int64_t{gridDim.x} * kThreads) {
    const auto token = static_cast<int>(unit / of_token);
    const int64_t slot = __ldg(args.slots + token);
    if (slot < 0) continue;
    const Nvfp4PlainPlace place(g, static_cast<int>(unit % of_token));
    const float* const scales = place.key ? args.k_scale : args.v_scale;
    float x[kTokenDims];
    LoadDims(
        args.input_dtype, place.key ? args.k : args.v,
        (size_t(token) * g.kv_heads + place.head) * (place.key ? g.key_dim : g.value_dim) + place.d,
        x);
    const Nvfp4Codes codes =
        QuantizeBlock(x, scales == nullptr ? 1.0f : __ldg(scales + place.head), PairOfLanes(1), 1);
    StorePlain(g,
               to.base + size_t(slot >> (__ffs(args.page_size) - 1)) * to.page_bytes +
                   (size_t(slot) & (args.page_size - 1)) * PlainTokenBytes(g),
               place, codes);
  }
}

// A warp takes a token of a layer at a time.
template <int kThreads, bool kToPages>
__global__ void __launch_bounds__(kThreads)
    MoveNvfp4RunsKernel(const __grid_constant__ PlainRunsArgs args) {
  constexpr int kInFlight = 4;
  const KvGeometry& g = args.geometry;
  const int count = Nvfp4PlainPlace::Count(g);
  const int64_t tokens = int64_t{args.runs} * args.layers * args.slots;
  const int lane = threadIdx.x % 32;
  AppendArgs page;
  page.geometry = g;
  page.page_size = args.page_size;
  for (int64_t token = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; token < tokens;
       token += int64_t{gridDim.x} * kThreads / 32) {
    const auto run = static_cast<int>(token / (args.layers * args.slots));
    const auto in_run = static_cast<int>(token % (args.layers * args.slots));
    page.cache = args.cache + size_t(in_run / args.slots) * args.layer_bytes;
    const int64_t slot = __ldg(args.first + run) + in_run % args.slots;
    std::byte* const plain =
        args.plain + size_t(run) * args.run_bytes + size_t(in_run) * PlainTokenBytes(g);
    for (int begin = lane; begin < count; begin += 32 * kInFlight) {
      Nvfp4Codes held[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (begin + i * 32 >= count) continue;
        const Nvfp4PlainPlace place(g, begin + i * 32);
        const Nvfp4Address address(page, place.head);
        if constexpr (kToPages) {
          held[i] = LoadPlain(plain, place);
        } else {
          held[i] = place.key ? address.LoadKey(slot, place.d) : address.LoadValue(slot, place.d);
        }
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (begin + i * 32 >= count) continue;
        const Nvfp4PlainPlace place(g, begin + i * 32);
        const Nvfp4Address address(page, place.head);
        if constexpr (!kToPages) {
          StorePlain(g, plain, place, held[i]);
        } else if (place.key) {
          address.StoreKey(slot, place.d, held[i]);
        } else {
          address.StoreValue(slot, place.d, held[i]);
        }
      }
    }
  }
}

}  // namespace tributary::cuda
