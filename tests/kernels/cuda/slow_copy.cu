#include "kernels/cuda/ptx/cluster.cuh"
#include "tests/kernels/cuda/slow_copy.h"

namespace tributary::cuda {
namespace {

__device__ long long Nanoseconds() {
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__global__ void SlowCopy(const std::byte* from, std::byte* to, size_t bytes, int microseconds) {
  LetNextLaunchBegin();
  const long long begin = Nanoseconds();
  while (Nanoseconds() - begin < 1000LL * microseconds) __nanosleep(1000);
  for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

}  // namespace

cudaError_t LaunchSlowCopy(const std::byte* from, std::byte* to, size_t bytes, int microseconds,
                           cudaStream_t stream) {
  SlowCopy<<<1, 256, 0, stream>>>(from, to, bytes, microseconds);
  return cudaGetLastError();
}

}  // namespace tributary::cuda
