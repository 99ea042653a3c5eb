#include "kernels/cuda/launch/cluster.h"
#include "kernels/cuda/launch/on_device.h"

namespace tributary::cuda {
namespace {

constexpr int kSharedBytes = 128 * 1024;  // more than half of a multiprocessor's

__global__ void TakesAMultiprocessor() {}

// Of the current device.
cudaError_t CountClusters(int32_t (&clusters)[3]) {
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

}  // namespace

cudaError_t QueryClusters(int device, int32_t (&clusters)[3]) {
  return OnDevice(device, [&] { return CountClusters(clusters); });
}

}  // namespace tributary::cuda
