#include <cuda_fp16.h>

#include <string>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"
#include "kernels/nvfp4.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDims = 4;  // of a thread

template <DType kOut>
__device__ __forceinline__ void Store(void* out, size_t element, const float (&x)[kDims]) {
  constexpr int kWords = kDims * int(SizeOf(kOut)) / 4;
  uint32_t words[kWords];
  EncodeWords<kOut>(x, words);
  auto* to = static_cast<uint32_t*>(out) + element * SizeOf(kOut) / 4;
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *to = words[0];
  }
}

// The lanes of four neighbouring threads, who hold a block of NVFP4 between them.
__device__ __forceinline__ unsigned BlockLanes() { return 0xfu << (threadIdx.x % 32 & ~3u); }

// Like Store, of a block's quarter: the same operations as cpu::StoreOutput. The first thread of
// the block stores its scale. All four come here.
__device__ __forceinline__ void StoreNvfp4(const MergeArgs& args, bool alive, size_t element,
                                           const float (&x)[kDims]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kDims; ++i) largest = max(largest, MagnitudeBits(x[i]));
  largest = max(largest, __shfl_xor_sync(BlockLanes(), largest, 1));
  largest = max(largest, __shfl_xor_sync(BlockLanes(), largest, 2));
  if (!alive) return;
  const uint8_t scale = Nvfp4BlockScale(largest, args.out_scale);
  const float divisor = Nvfp4Divisor(scale, args.out_scale);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    codes |= uint32_t{Nvfp4Element(x[i], divisor)} << (4 * i);
  }
  static_cast<uint16_t*>(args.out)[element / kDims] = static_cast<uint16_t>(codes);
  if (threadIdx.x % 4 == 0) args.out_block_scales[element / kNvfp4Block] = scale;
}

// Elements [element, element + kDims) of a source.
__device__ __forceinline__ float4 Load(const void* o, DType type, size_t element) {
  if (type == DType::kF32) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(o) + element);
  }
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(o) + element);
  if (type == DType::kBf16) {
    return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                       __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
  }
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&words.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&words.y));
  return make_float4(low.x, low.y, high.x, high.y);
}

// value_dim / 4 neighbouring threads merge one head of one row. Each of them reads all sources
// before any of them writes, so that the result may lie where a source does.
template <DType kOut>
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeArgs args) {
  const int threads = args.value_dim / kDims;
  const int64_t unit = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t at = unit / threads;
  const int d = static_cast<int>(unit % threads) * kDims;
  const bool alive = at < int64_t{args.rows} * args.heads;
  const int64_t row = at / args.heads;
  const int64_t head = at - row * args.heads;
  UnionLse<float> of_all;
  for (int s = 0; alive && s < args.sources; ++s) {
    of_all.See(args.lse[s][row * args.source_heads[s] + head]);
  }
  float x[kDims] = {};
  for (int s = 0; alive && s < args.sources; ++s) {
    const int64_t from = row * args.source_heads[s] + head;
    const float weight = of_all.WeightOf(args.lse[s][from]);
    // A source without keys is left out altogether: nothing is asked of its output.
    if (weight == 0.0f) continue;
    const float4 o = Load(args.o[s], args.source_dtype, from * args.value_dim + d);
    of_all.Add(weight);
    x[0] += weight * o.x;
    x[1] += weight * o.y;
    x[2] += weight * o.z;
    x[3] += weight * o.w;
  }
  const float lse = of_all.Lse();
  float scale = of_all.Scale();
  if (alive && args.sinks != nullptr && !of_all.empty()) {
    scale *= SinkScale(lse, args.sinks[head]);
  }
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    x[i] *= scale;
    if (kOut != DType::kNvfp4 && args.out_scale != 1.0f) x[i] /= args.out_scale;
  }
  __syncthreads();  // lse_out may be a source, read by the other threads of the row
  const int64_t to = row * args.out_heads + head;
  if constexpr (kOut == DType::kNvfp4) {
    StoreNvfp4(args, alive, to * args.value_dim + d, x);
  } else if (alive) {
    Store<kOut>(args.out, to * args.value_dim + d, x);
  }
  if (alive && d == 0 && args.lse_out != nullptr) args.lse_out[to] = lse;
}

template <DType kOut>
Status Run(const MergeArgs& args, cudaStream_t stream) {
  // Whole rows to a block, so that its barrier is a barrier of the row.
  const int threads = args.value_dim / kDims;
  const int block = kThreads / threads * threads;
  const int64_t units = int64_t{args.rows} * args.heads * threads;
  MergeKernel<kOut><<<static_cast<unsigned>((units + block - 1) / block), block, 0, stream>>>(args);
  return CudaStatus(cudaGetLastError(), "merge kernel");
}

Status TooFewHeads(const std::string& field, int32_t given, int32_t heads) {
  return InvalidArgument(field + ": " + std::to_string(given) + " is below " +
                         std::to_string(heads) + " heads");
}

}  // namespace

Status LaunchMerge(const MergeArgs& given, cudaStream_t stream) {
  MergeArgs args = given;
  if (args.sources < 1 || args.sources > kMaxMergeSources) {
    return InvalidArgument("sources: " + std::to_string(args.sources) + " is not 1.." +
                           std::to_string(kMaxMergeSources));
  }
  if (args.value_dim < kDims || args.value_dim % kDims != 0 || args.value_dim > kThreads * kDims) {
    return InvalidArgument("value_dim: " + std::to_string(args.value_dim) +
                           " is not a multiple of 4 up to 1024");
  }
  if (args.rows < 0 || args.heads < 0) return InvalidArgument("rows, heads: must not be negative");
  if (args.out_heads == 0) args.out_heads = args.heads;
  if (args.out_heads < args.heads) return TooFewHeads("out_heads", args.out_heads, args.heads);
  for (int s = 0; s < args.sources; ++s) {
    if (args.source_heads[s] == 0) args.source_heads[s] = args.heads;
    if (args.source_heads[s] < args.heads) {
      return TooFewHeads("source_heads[" + std::to_string(s) + "]", args.source_heads[s],
                         args.heads);
    }
  }
  if (!IsUnscaled(args.source_dtype))
    return InvalidArgument("source_dtype: must be f32, bf16 or f16");
  if (args.out_dtype == DType::kNvfp4 &&
      (args.value_dim % kNvfp4Block != 0 || args.out_block_scales == nullptr)) {
    return InvalidArgument("out_block_scales: NVFP4 has a scale for each 16 of value_dim");
  }
  if (args.rows == 0 || args.heads == 0) return Status::Ok();
  if (args.out_dtype == DType::kNvfp4) return Run<DType::kNvfp4>(args, stream);
  if (args.out_dtype == DType::kF32) return Run<DType::kF32>(args, stream);
  return DispatchKvType(args.out_dtype, [&](auto out) { return Run<out()>(args, stream); });
}

Status LoadMergeKernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(MergeKernel<DType::kF32>),
                                 reinterpret_cast<const void*>(MergeKernel<DType::kBf16>),
                                 reinterpret_cast<const void*>(MergeKernel<DType::kF16>),
                                 reinterpret_cast<const void*>(MergeKernel<DType::kFp8E4M3>),
                                 reinterpret_cast<const void*>(MergeKernel<DType::kFp8E5M2>),
                                 reinterpret_cast<const void*>(MergeKernel<DType::kNvfp4>)};
  return LoadKernels(kernels, "the merge");
}

}  // namespace tributary::cuda
