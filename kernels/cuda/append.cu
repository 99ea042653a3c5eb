#include <string>

#include "kernels/cuda/append.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/page_layout.h"
#include "kernels/half.h"
#include "kernels/params.h"

namespace tributary::cuda {
namespace {

constexpr int kDims = 8;  // of a thread; a warp takes 16 tokens of 64 dimensions
constexpr int kWarps = 8;

__device__ __forceinline__ void LoadDims(DType type, const void* data, size_t element,
                                         float (&x)[kDims]) {
  if (type == DType::kF32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + element);
    const float4 low = __ldcs(from);
    const float4 high = __ldcs(from + 1);
    const float all[kDims] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kDims; ++i) x[i] = all[i];
    return;
  }
  const uint4 v =
      __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + element));
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    x[i] = type == DType::kBf16 ? FloatFromBf16(bits) : FloatFromF16(bits);
  }
}

__device__ __forceinline__ void Unscale(const float* scales, int head, float (&x)[kDims]) {
  if (scales == nullptr) return;
  const float scale = __ldg(scales + head);
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    if (x[i] == x[i]) x[i] = __fdiv_rn(x[i], scale);  // a NaN keeps its bits
  }
}

template <DType kKv>
struct PlaneAddress {
  const AppendArgs& args;
  int head;

  __device__ std::byte* Plane(int64_t slot, bool values) const {
    const int64_t page = slot / args.page_size;
    const size_t plane = size_t(args.page_size) * args.head_dim * SizeOf(kKv);
    return args.cache +
           (size_t(page) * 2 * args.kv_heads + (values ? args.kv_heads : 0) + head) * plane;
  }
  __device__ std::byte* Key(int64_t slot, int d) const {
    return Plane(slot, false) +
           KeyOffset(static_cast<int>(slot % args.page_size), d, args.head_dim, SizeOf(kKv));
  }
  __device__ std::byte* Value(int64_t slot, int d) const {
    return Plane(slot, true) +
           ValueOffset(static_cast<int>(slot % args.page_size), d, args.head_dim, SizeOf(kKv));
  }
};

template <DType kKv>
__device__ __forceinline__ void StoreKey(std::byte* to, const float (&x)[kDims]) {
  uint32_t words[kDims * SizeOf(kKv) / 4];
  EncodeWords<kKv>(x, words);
  if constexpr (SizeOf(kKv) == 1) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// A whole quad of tokens: full vectors.
template <DType kKv>
__device__ __forceinline__ void StoreQuad(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                          const float (&x)[kQuadTokens][kDims]) {
  constexpr int kVector = ValueVectorDims(SizeOf(kKv));
#pragma unroll
  for (int begin = 0; begin < kDims; begin += kVector) {
    float transposed[kVector * kQuadTokens];
#pragma unroll
    for (int i = 0; i < kVector * kQuadTokens; ++i) {
      transposed[i] = x[i % kQuadTokens][begin + i / kQuadTokens];
    }
    uint32_t words[4];
    EncodeWords<kKv>(transposed, words);
    *reinterpret_cast<uint4*>(address.Value(slot, d + begin)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// One token of a quad: single elements between those of its neighbours.
template <DType kKv>
__device__ __forceinline__ void StoreValue(const PlaneAddress<kKv>& address, int64_t slot, int d,
                                           const float (&x)[kDims]) {
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const uint32_t bits = Encode<kKv>(x[i]);
    std::byte* to = address.Value(slot, d + i);
    if constexpr (SizeOf(kKv) == 1) {
      *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(bits);
    } else {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
    }
  }
}

// Lane (r, t) of a warp takes dimensions [8r, 8r + 8) of tokens [4t, 4t + 4) of its 16: its writes
// and its neighbours' fill whole sectors.
template <DType kKv>
__global__ void __launch_bounds__(32 * kWarps)
    AppendKernel(const __grid_constant__ AppendArgs args) {
  const int lane = threadIdx.x % 32;
  const int slices = args.head_dim / 64;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int slice = static_cast<int>(unit % slices);
  const int head = static_cast<int>(unit / slices % args.kv_heads);
  const int64_t first = unit / slices / args.kv_heads * kGroupTokens + lane % 4 * kQuadTokens;
  if (first >= args.tokens) return;
  const int d = slice * 64 + lane / 4 * kDims;
  const PlaneAddress<kKv> address{args, head};

  int64_t slots[kQuadTokens];
  float v[kQuadTokens][kDims] = {};
  bool whole = true;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const int64_t token = first + i;
    slots[i] = token < args.tokens ? __ldg(args.slots + token) : kPadSlot;
    whole &= slots[i] >= 0 && slots[i] == slots[0] + i;
    if (slots[i] < 0) continue;
    const size_t element = (size_t(token) * args.kv_heads + head) * args.head_dim + d;
    float k[kDims];
    LoadDims(args.input_dtype, args.k, element, k);
    LoadDims(args.input_dtype, args.v, element, v[i]);
    Unscale(args.k_scale, head, k);
    Unscale(args.v_scale, head, v[i]);
    StoreKey<kKv>(address.Key(slots[i], d), k);
  }
  if (whole && slots[0] % kQuadTokens == 0) {
    StoreQuad<kKv>(address, slots[0], d, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (slots[i] >= 0) StoreValue<kKv>(address, slots[i], d, v[i]);
  }
}

}  // namespace

Status LaunchAppend(const AppendArgs& args, cudaStream_t stream) {
  if (IsFp8(args.input_dtype)) {
    return Unsupported(std::string("input_dtype: ") + Name(args.input_dtype) +
                       " is not f32, bf16 or f16");
  }
  if (args.tokens < 0) return InvalidArgument("tokens: must not be negative");
  if (args.tokens == 0) return Status::Ok();
  const int64_t units = int64_t{(args.tokens + kGroupTokens - 1) / kGroupTokens} * args.kv_heads *
                        (args.head_dim / 64);
  const auto blocks = static_cast<unsigned>((units + kWarps - 1) / kWarps);
  return DispatchKvType(args.kv, [&](auto kv) {
    return DispatchHeadDim(args.head_dim, [&](auto) {
      AppendKernel<kv()><<<blocks, 32 * kWarps, 0, stream>>>(args);
      const cudaError_t error = cudaGetLastError();
      if (error == cudaSuccess) return Status::Ok();
      return Status(StatusCode::kInternal,
                    std::string("append kernel: ") + cudaGetErrorString(error));
    });
  });
}

}  // namespace tributary::cuda
