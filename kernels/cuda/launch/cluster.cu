#include "kernels/cuda/launch/cluster.h"

namespace tributary::cuda {
namespace {

constexpr int kSharedBytes = 128 * 1024;  // more than half of a multiprocessor's

__global__ void TakesAMultiprocessor() {}

}  // namespace

cudaError_t QueryClusters(int device, int32_t (&clusters)[3]) {
  int current = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(TakesAMultiprocessor, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes);
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
  const cudaError_t restored = current != device ? cudaSetDevice(current) : cudaSuccess;
  return error != cudaSuccess ? error : restored;
}

}  // namespace tributary::cuda
