#include <cuda_fp16.h>

#include <string>

#include "base/cuda/early_launch.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/merge/merge.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/ptx/encode_nvfp4.cuh"
#include "kernels/cuda/ptx/quotient.cuh"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"
#include "kernels/nvfp4.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDims = 4;  // of a thread
// Neighbouring threads that hold a block of NVFP4 between them.
constexpr int kBlockThreads = kNvfp4Block / kDims;

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

// Divides any numbers.
__device__ __noinline__ float4 CarefulQuotients(float4 x, float divisor) {
  return make_float4(x.x / divisor, x.y / divisor, x.z / divisor, x.w / divisor);
}

// Divides what is going to be rounded to FP8.
__device__ __forceinline__ void Divide(float divisor, float (&x)[kDims]) {
  if (!DividesQuickly(LargestMagnitude(x), divisor)) {
    const float4 quotients = CarefulQuotients(make_float4(x[0], x[1], x[2], x[3]), divisor);
    x[0] = quotients.x;
    x[1] = quotients.y;
    x[2] = quotients.z;
    x[3] = quotients.w;
    return;
  }
  const float inverse = QuickInverse(divisor);
#pragma unroll
  for (float& number : x) number = copysignf(QuickQuotient(number, divisor, inverse), number);
}

// The lanes of the threads that hold this thread's block.
__device__ __forceinline__ unsigned BlockLanes() {
  unsigned lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return ((1u << kBlockThreads) - 1) << (lane / kBlockThreads * kBlockThreads);
}

// Like Store, of part of an NVFP4 block. The threads that hold the block between them all come
// here.
__device__ __forceinline__ void StoreNvfp4(const MergeArgs& args, size_t element,
                                           const float (&x)[kDims], bool stores) {
  uint32_t largest = LargestMagnitude(x);
#pragma unroll
  for (int other = 1; other < kBlockThreads; other *= 2) {
    largest = max(largest, __shfl_xor_sync(BlockLanes(), largest, other));
  }
  const Nvfp4Codes block = EncodeNvfp4(x, largest, args.out_scale);
  if (!stores) return;
  static_cast<uint16_t*>(args.out)[element / kDims] = static_cast<uint16_t>(block.codes);
  if (threadIdx.x % kBlockThreads == 0) args.out_block_scales[element / kNvfp4Block] = block.scale;
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

// Stores a thread's numbers as elements of the result, or does all but that.
template <DType kOut>
__device__ __forceinline__ void StoreResult(const MergeArgs& args, size_t element,
                                            float (&x)[kDims], bool stores = true) {
  if constexpr (kOut == DType::kNvfp4) {
    StoreNvfp4(args, element, x, stores);
  } else {
    if constexpr (IsFp8(kOut)) Divide(args.out_scale, x);
    if (stores) Store<kOut>(args.out, element, x);
  }
}

// `x`, of which the compiler is not to know more.
__device__ __forceinline__ float Opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// How threads of ConvertKernel find their rows. (To divide takes as long as all the rest.)
struct RowsOfBlock {
  uint32_t threads = 1;  // of a head of a row
  uint32_t rows = 1;
  uint32_t inverse = 0;  // 2^16 / threads, rounded up: thread * inverse / 2^16 is its row

  explicit RowsOfBlock(uint32_t value_dim)
      : threads(value_dim / kDims), rows(kThreads / threads), inverse(65535 / threads + 1) {}
};

// A merge of one source in f32 whose rows are the result's, without sinks: the source itself, in
// another type. It is behind nearly every call, its code has left the caches by then, and to bring
// that back takes longer than all that it does. So there is little of it, and a first round, while
// launches ahead still run, does everything with numbers that are stored nowhere.
// value_dim / 4 neighbouring threads take one head of one row, and a block has whole ones.
template <DType kOut>
__global__ void __launch_bounds__(kThreads)
    ConvertKernel(const __grid_constant__ MergeArgs args, const RowsOfBlock of_block) {
  const uint32_t row = threadIdx.x * of_block.inverse >> 16;
  const uint32_t at = blockIdx.x * of_block.rows + row;
  const bool alive = at < static_cast<uint32_t>(args.rows) * args.heads;
  const bool first = threadIdx.x == row * of_block.threads;
  const size_t element = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * kDims;
  float lse = Opaque(0.0f);
  const float ordinary = Opaque(args.out_scale);
  float4 o = {ordinary, ordinary, ordinary, ordinary};
#pragma unroll 1
  for (float round = Opaque(0.0f);; round += 1.0f) {
    const bool stores = round > 0.0f;
    if (stores) {
      WaitForLaunchesAhead();
      LetNextLaunchBegin();
      if (!alive) return;
      lse = args.lse[0][at];
      o = *reinterpret_cast<const float4*>(static_cast<const float*>(args.o[0]) + element);
    }
    if (lse == -INFINITY) o = {};  // there is no output without keys, whatever lies there
    float x[kDims] = {o.x, o.y, o.z, o.w};
    StoreResult<kOut>(args, element, x, stores);
    if (!stores) continue;
    if (first && args.lse_out != nullptr) args.lse_out[at] = lse;
    return;
  }
}

// value_dim / 4 neighbouring threads merge one head of one row, and a block has whole ones. Each of
// them reads all sources before any of them writes, so that the result may lie where a source does.
template <DType kOut>
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ MergeArgs args) {
  const int threads = args.value_dim / kDims;
  const int of_block = static_cast<int>(threadIdx.x) / threads;
  const int d = (static_cast<int>(threadIdx.x) - of_block * threads) * kDims;
  // Of [rows, heads], which no GPU's memory holds 2^31 of.
  const uint32_t at = blockIdx.x * (blockDim.x / threads) + of_block;
  const bool alive = at < static_cast<uint32_t>(args.rows) * args.heads;
  const int64_t row = at / args.heads;
  const int64_t head = at - row * args.heads;
  WaitForLaunchesAhead();
  LetNextLaunchBegin();
  UnionLse<float> of_all;
  for (int s = 0; alive && s < args.sources; ++s) {
    of_all.See(args.lse[s][row * args.source_heads[s] + head]);
  }
  float x[kDims] = {};
  for (int s = 0; alive && s < args.sources; ++s) {
    const int64_t from = row * args.source_heads[s] + head;
    // Asked for before it is known whether it counts: one wait instead of two.
    const float4 o = Load(args.o[s], args.source_dtype, from * args.value_dim + d);
    const float weight = of_all.WeightOf(args.lse[s][from]);
    // A source without keys is left out altogether, whatever its output is.
    if (weight == 0.0f) continue;
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
  for (float& number : x) number *= scale;
  __syncthreads();  // lse_out may be a source, read by the other threads of the row
  if (!alive) return;
  const int64_t to = row * args.out_heads + head;
  StoreResult<kOut>(args, to * args.value_dim + d, x);
  if (d == 0 && args.lse_out != nullptr) args.lse_out[to] = lse;
}

// Whether ConvertKernel does it.
bool IsConversion(const MergeArgs& args) {
  return args.sources == 1 && args.source_dtype == DType::kF32 && args.sinks == nullptr &&
         args.source_heads[0] == args.heads && args.out_heads == args.heads;
}

template <DType kOut>
Status Run(const MergeArgs& args, cudaStream_t stream) {
  // Whole rows to a block, so that its barrier is a barrier of the row.
  const RowsOfBlock of_block(static_cast<uint32_t>(args.value_dim));
  const int64_t blocks = (int64_t{args.rows} * args.heads + of_block.rows - 1) / of_block.rows;
  const Grid grid{.clusters = static_cast<int32_t>(blocks), .begins_early = args.begins_early};
  const int threads = static_cast<int>(of_block.rows * of_block.threads);
  return CudaStatus(IsConversion(args)
                        ? LaunchGrid(ConvertKernel<kOut>, args, grid, threads, 0, stream, of_block)
                        : LaunchGrid(MergeKernel<kOut>, args, grid, threads, 0, stream),
                    "merge kernel");
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
                                 reinterpret_cast<const void*>(MergeKernel<DType::kNvfp4>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kF32>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kBf16>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kF16>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kFp8E4M3>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kFp8E5M2>),
                                 reinterpret_cast<const void*>(ConvertKernel<DType::kNvfp4>)};
  return LoadKernels(kernels, "the merge");
}

}  // namespace tributary::cuda
