#include "kernels/cuda/decode/queries.cuh"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/prefill/convert_queries.h"
#include "kernels/cuda/ptx/encode.cuh"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDims = 8;  // that a thread takes of a query

// A query's power of two brings it into the range of the type computed in; bf16 needs none.
template <DType kTo>
__device__ __forceinline__ PowerOfTwo NormaliserOf(bool to_fp8, float max_abs) {
  if constexpr (kTo == DType::kBf16) return {1.0f, 1.0f};
  return to_fp8 ? Fp8QueryNormaliser(max_abs) : QueryNormaliser<14>(max_abs);
}

template <DType kTo, int kKeyDim>
__global__ void __launch_bounds__(kThreads)
    ConvertQueriesKernel(const __grid_constant__ ConvertQueriesArgs args) {
  constexpr int kVectors = kKeyDim / kDims;
  constexpr int kLanes = QueryLanes(kKeyDim);
  static_assert(kVectors * kDims == kKeyDim && kLanes <= 32);
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t head = unit / kLanes;
  const int vector = static_cast<int>(threadIdx.x % kLanes);
  const bool mine = head < args.heads && vector < kVectors;
  const int64_t element = head * kKeyDim + vector * kDims;
  uint4 raw[2] = {};
  if (mine) {
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const std::byte*>(args.q) +
                                                      element * SizeOf(args.from));
    raw[0] = from[0];
    if (args.from == DType::kF32) raw[1] = from[1];
  }
  float x[kDims];
  QueryToFloat(args.from, raw, x);
  const bool to_fp8 = kTo == DType::kFp8E4M3 || (kTo == DType::kF16 && args.rounds);
  const float max_abs = kTo == DType::kBf16 ? 0.0f : LargestOfQuery<kLanes>(x);
  const PowerOfTwo normaliser = NormaliserOf<kTo>(to_fp8, max_abs);
  if (!mine) return;
#pragma unroll
  for (int i = 0; i < kDims; ++i) x[i] *= normaliser.value;
  std::byte* const out = args.out + element * SizeOf(kTo);
  if (vector == 0) args.scale[head] = normaliser.inverse;
  if (to_fp8 && kTo == DType::kF16) {
    *reinterpret_cast<uint4*>(out) = RoundToE4M3(x);
    return;
  }
  uint32_t words[kDims * SizeOf(kTo) / 4];
  EncodeWords<kTo>(x, words);
  if constexpr (SizeOf(kTo) == 1) {
    *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <int kKeyDim>
void Launch(const ConvertQueriesArgs& args, cudaStream_t stream) {
  const int64_t threads = args.heads * QueryLanes(kKeyDim);
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  const auto run = [&](auto kernel) { kernel<<<blocks, kThreads, 0, stream>>>(args); };
  if (args.to == DType::kBf16) {
    run(ConvertQueriesKernel<DType::kBf16, kKeyDim>);
  } else if (args.to == DType::kF16) {
    run(ConvertQueriesKernel<DType::kF16, kKeyDim>);
  } else {
    run(ConvertQueriesKernel<DType::kFp8E4M3, kKeyDim>);
  }
}

}  // namespace

cudaError_t RunConvertQueries(const ConvertQueriesArgs& args, cudaStream_t stream) {
  const Status status = DispatchHeadDims<&HeadDims::prefill_sm80>(
      args.geometry.key_dim, args.geometry.value_dim, [&](auto key_dim, auto /*value_dim*/) {
        Launch<key_dim()>(args, stream);
        return Status::Ok();
      });
  return status.ok() ? cudaGetLastError() : cudaErrorNotSupported;
}

}  // namespace tributary::cuda
