#include "kernels/cuda/launch/cluster.h"

namespace tributary::cuda {
namespace {

constexpr int kSharedBytes = 128 * 1024;  // more than half of a multiprocessor's

__global__ void TakesAMultiprocessor() {}

}  // namespace

cudaError_t QueryClusters(int32_t (&clusters)[3]) {
  cudaError_t error = cudaFuncSetAttribute(
      TakesAMultiprocessor, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  for (int i = 0; i < 3 && error == cudaSuccess; ++i) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {2u << i, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(2u << i);
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaOccupancyMaxActiveClusters(&clusters[i], TakesAMultiprocessor, &config);
  }
  return error;
}

}  // namespace tributary::cuda
