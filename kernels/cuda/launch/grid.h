// How a kernel of this folder is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tributary::cuda {

// Blocks of a cluster that work together; a power of two.
inline constexpr int32_t kMaxClusterSize = 8;

struct Grid {
  int32_t clusters = 0;
  int32_t cluster_size = 1;
  // Begins while the launch ahead is still running, once all blocks of that have begun. sm_90.
  bool begins_early = false;
};

// Launches kernel(args, more...) with `threads` threads and `shared_bytes` of shared memory per
// block.
template <typename Args, typename... More>
cudaError_t LaunchGrid(void (*kernel)(Args, More...), const Args& args, const Grid& grid,
                       int threads, size_t shared_bytes, cudaStream_t stream, const More&... more) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.clusters * grid.cluster_size);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (grid.cluster_size > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(grid.cluster_size), 1, 1};
  }
  if (grid.begins_early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args, more...);
}

}  // namespace tributary::cuda
