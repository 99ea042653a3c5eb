#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/cuda/prefill/prefill_operands.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/ptx.cuh"
#include "kernels/cuda/ptx/widen.cuh"

namespace tributary::cuda {
namespace {

constexpr int kDims = 8;  // of a thread
constexpr int kWarps = kGatherSlots / kGroupTokens;

// Two elements of compute type from two cache elements in the low half (FP8) or all (16 bits).
template <DType kKv, DType kCompute>
__device__ __forceinline__ uint32_t WidenPair(uint32_t pair) {
  if constexpr (SizeOf(kKv) == 2) return pair;
  const uint32_t f16 = kKv == DType::kFp8E4M3 ? WidenE4M3<false>(pair) : WidenE5M2<false>(pair);
  if constexpr (kCompute == DType::kF16) return f16;
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&f16));
  return Pack<DType::kBf16>(x.x, x.y);  // exact
}

// kCount elements, packed.
template <DType kKv, DType kCompute, int kCount>
__device__ __forceinline__ void WidenAll(const uint32_t (&in)[kCount * SizeOf(kKv) / 4],
                                         uint32_t (&out)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint32_t pair = SizeOf(kKv) == 2 ? in[i] : in[i / 2] >> (i % 2 * 16);
    out[i] = WidenPair<kKv, kCompute>(pair);
  }
}

template <int kWords>
__device__ __forceinline__ void LoadWords(const std::byte* from, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 2) {
    const uint2 x = LoadStreaming8(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    static_assert(kWords == 4);
    const uint4 x = LoadStreaming(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  }
}

// Dimensions [d, d + 8) of the keys of a quad of tokens, as they are.
template <DType kKv>
__device__ __forceinline__ void LoadKeys(const std::byte* plane, int token, int d, int head_dim,
                                         uint32_t (&k)[kQuadTokens][kDims * SizeOf(kKv) / 4]) {
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    LoadWords(plane + KeyOffset(token + i, d, head_dim, SizeOf(kKv)), k[i]);
  }
}

// The same of its values, widened; in the page four tokens of a dimension lie side by side.
template <DType kKv, DType kCompute>
__device__ __forceinline__ void LoadValues(const std::byte* plane, int token, int d, int head_dim,
                                           uint32_t (&v)[kQuadTokens][kDims / 2]) {
  constexpr int kVectorDims = ValueVectorDims(SizeOf(kKv));
  constexpr int kVectors = kDims / kVectorDims;
  uint32_t raw[kVectors][4];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    LoadWords(plane + ValueOffset(token, d + i * kVectorDims, head_dim, SizeOf(kKv)), raw[i]);
  }
  uint32_t wide[kDims][2];  // a dimension's tokens (0, 1) and (2, 3)
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    uint32_t pairs[kVectorDims * 2];
    WidenAll<kKv, kCompute, kVectorDims * kQuadTokens>(raw[i], pairs);
#pragma unroll
    for (int j = 0; j < kVectorDims; ++j) {
      wide[i * kVectorDims + j][0] = pairs[2 * j];
      wide[i * kVectorDims + j][1] = pairs[2 * j + 1];
    }
  }
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const uint32_t selector = i % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
    for (int j = 0; j < kDims / 2; ++j) {
      v[i][j] = __byte_perm(wide[2 * j][i / 2], wide[2 * j + 1][i / 2], selector);
    }
  }
}

// Eight elements of a row; zeros when dead.
template <int kWords>
__device__ __forceinline__ void StoreRow(std::byte* to, bool alive, const uint32_t (&x)[kWords]) {
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = alive ? make_uint2(x[0], x[1]) : make_uint2(0, 0);
  } else {
    *reinterpret_cast<uint4*>(to) =
        alive ? make_uint4(x[0], x[1], x[2], x[3]) : make_uint4(0, 0, 0, 0);
  }
}

// A warp takes 16 tokens of 64 dimensions of one head, keys and values; lane (r, t) dimensions
// [8r, 8r + 8) of tokens [4t, 4t + 4): it reads whole sectors of the page and writes 128
// consecutive bytes of a row.
template <DType kKv, DType kCompute, bool kKeepKeys>
__global__ void __launch_bounds__(32 * kWarps)
    GatherPagesKernel(const __grid_constant__ GatherArgs args) {
  const PrefillGather gather = args.gathers[blockIdx.x];
  const int slices = args.head_dim / 64;
  const int head = blockIdx.y / slices;
  const int lane = threadIdx.x % 32;
  const int d = blockIdx.y % slices * 64 + lane / 4 * kDims;
  const int in_tile = threadIdx.x / 32 * kGroupTokens + lane % 4 * kQuadTokens;
  const int slot = gather.first_slot + in_tile;
  uint32_t k[kQuadTokens][kDims * SizeOf(kKv) / 4] = {};
  uint32_t v[kQuadTokens][kDims / 2] = {};
  if (slot < gather.slot_end && slot + kQuadTokens > gather.slot_begin) {
    const int shift = __ffs(args.page_size) - 1;
    const int page = __ldg(args.page_tables + gather.page_table + (slot >> shift));
    const size_t plane = size_t(args.head_dim) * SizeOf(kKv) << shift;
    const std::byte* keys = args.cache + (size_t(page) * 2 * args.kv_heads + head) * plane;
    const int token = slot & (args.page_size - 1);
    LoadKeys<kKv>(keys, token, d, args.head_dim, k);
    LoadValues<kKv, kCompute>(keys + args.kv_heads * plane, token, d, args.head_dim, v);
  }
  const size_t row = size_t(blockIdx.x) * kGatherSlots + in_tile;
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    const bool alive = slot + i >= gather.slot_begin && slot + i < gather.slot_end;
    const size_t at = ((row + i) * args.kv_heads + head) * args.head_dim + d;
    StoreRow(args.v + at * 2, alive, v[i]);
    if constexpr (kKeepKeys) {
      StoreRow(args.k + at * SizeOf(kKv), alive, k[i]);
    } else {
      uint32_t wide[kDims / 2];
      WidenAll<kKv, kCompute, kDims>(k[i], wide);
      StoreRow(args.k + at * 2, alive, wide);
    }
  }
}

// A head's elements are spread over head_dim / 8 lanes. Types of little range get a scale a head.
template <DType kTo, int kHeadDim>
__global__ void __launch_bounds__(256)
    ConvertQueriesKernel(const __grid_constant__ ConvertQueriesArgs args) {
  constexpr int kLanes = kHeadDim / kDims;
  const int64_t unit = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const int64_t head = unit / kLanes;
  const bool mine = head < args.heads;
  float x[kDims] = {};
  if (mine) {
    const auto* from = static_cast<const std::byte*>(args.q) + unit * kDims * SizeOf(args.from);
    if (args.from == DType::kF32) {
      const float4 low = reinterpret_cast<const float4*>(from)[0];
      const float4 high = reinterpret_cast<const float4*>(from)[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
      const uint4 raw = *reinterpret_cast<const uint4*>(from);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < kDims / 2; ++i) {
        if (args.from == DType::kBf16) {
          x[2 * i] = __uint_as_float(words[i] << 16);
          x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
          const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
          x[2 * i] = pair.x;
          x[2 * i + 1] = pair.y;
        }
      }
    }
  }
  const bool to_fp8 = kTo == DType::kFp8E4M3 || (kTo == DType::kF16 && args.rounds);
  PowerOfTwo normaliser{1.0f, 1.0f};
  if constexpr (kTo != DType::kBf16) {
    const float max_abs = LargestOfQuery<kLanes>(x);
    normaliser = to_fp8 ? Fp8QueryNormaliser(max_abs) : QueryNormaliser<14>(max_abs);
  }
  if (!mine) return;
#pragma unroll
  for (int i = 0; i < kDims; ++i) x[i] *= normaliser.value;
  std::byte* const out = args.out + unit * kDims * SizeOf(kTo);
  if (to_fp8 && kTo == DType::kF16) {
    *reinterpret_cast<uint4*>(out) = RoundToE4M3(x);
  } else {
    uint32_t words[kDims * SizeOf(kTo) / 4];
    EncodeWords<kTo>(x, words);
    StoreRow(out, true, words);
  }
  if (unit % kLanes == 0) args.scale[head] = normaliser.inverse;
}

}  // namespace

cudaError_t RunGatherPages(const GatherArgs& args, cudaStream_t stream) {
  const dim3 grid(args.gather_count, args.kv_heads * (args.head_dim / 64));
  const auto run = [&](auto kernel) { kernel<<<grid, 32 * kWarps, 0, stream>>>(args); };
  const Status status = DispatchKvType(args.kv, [&](auto kv) {
    constexpr DType kKv = kv();
    if constexpr (!IsFp8(kKv)) {
      run(GatherPagesKernel<kKv, kKv, false>);
    } else if (args.keep_keys) {
      run(GatherPagesKernel<kKv, DType::kF16, true>);
    } else if (args.compute == DType::kBf16) {
      run(GatherPagesKernel<kKv, DType::kBf16, false>);
    } else {
      run(GatherPagesKernel<kKv, DType::kF16, false>);
    }
    return Status::Ok();
  });
  return status.ok() ? cudaGetLastError() : cudaErrorNotSupported;
}

cudaError_t RunConvertQueries(const ConvertQueriesArgs& args, cudaStream_t stream) {
  const int64_t threads = args.heads * (args.head_dim / kDims);
  const auto blocks = static_cast<unsigned>((threads + 255) / 256);
  const Status status = DispatchHeadDims<&HeadDims::prefill_sm80>(
      args.head_dim, args.head_dim, [&](auto head_dim, auto) {
        const auto run = [&](auto kernel) { kernel<<<blocks, 256, 0, stream>>>(args); };
        if (args.to == DType::kBf16) {
          run(ConvertQueriesKernel<DType::kBf16, head_dim()>);
        } else if (args.to == DType::kF16) {
          run(ConvertQueriesKernel<DType::kF16, head_dim()>);
        } else {
          run(ConvertQueriesKernel<DType::kFp8E4M3, head_dim()>);
        }
        return Status::Ok();
      });
  return status.ok() ? cudaGetLastError() : cudaErrorNotSupported;
}

}  // namespace tributary::cuda
