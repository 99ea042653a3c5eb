#include <algorithm>
#include <string>

#include "kernels/cuda/prefill/narrow.h"
#include "kernels/cuda/ptx/encode.cuh"
#include "kernels/cuda/status.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // that a thread takes at a time
constexpr int64_t kMostBlocks = 2048;

__global__ void __launch_bounds__(kThreads)
    NarrowKernel(const float4* __restrict__ from, uint2* __restrict__ to, int64_t quads) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < quads;
       i += int64_t{gridDim.x} * kThreads) {
    const float4 wide = __ldcs(from + i);
    const float x[kElements] = {wide.x, wide.y, wide.z, wide.w};
    uint32_t words[2];
    EncodeWords<DType::kBf16>(x, words);
    to[i] = make_uint2(words[0], words[1]);
  }
}

}  // namespace

Status LaunchNarrow(const float* from, uint16_t* to, int64_t elements, cudaStream_t stream) {
  if (elements < 0 || elements % kElements != 0) {
    return InvalidArgument("elements: " + std::to_string(elements) + " is not a multiple of 4");
  }
  if (elements == 0) return Status::Ok();
  const int64_t quads = elements / kElements;
  const int64_t blocks = std::min(kMostBlocks, (quads + kThreads - 1) / kThreads);
  NarrowKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(from), reinterpret_cast<uint2*>(to), quads);
  return CudaStatus(cudaGetLastError(), "narrow kernel");
}

}  // namespace tributary::cuda
