#include <algorithm>
#include <string>

#include "kernels/cuda/append/copy_page.h"
#include "kernels/cuda/status.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = sizeof(uint4);
constexpr size_t kBlocksOfPage = 64;  // at most; a page may have megabytes

// Block (x, y) takes every gridDim.x-th part of the page in every gridDim.y-th layer.
__global__ void __launch_bounds__(kThreads)
    CopyPageKernel(const __grid_constant__ CopyPageArgs args) {
  const size_t vectors = args.page_bytes / kVectorBytes;
  for (int layer = blockIdx.y; layer < args.layers; layer += gridDim.y) {
    std::byte* base = args.base + size_t(layer) * args.layer_bytes;
    const auto* from = reinterpret_cast<const uint4*>(base + size_t(args.source) * args.page_bytes);
    auto* to = reinterpret_cast<uint4*>(base + size_t(args.destination) * args.page_bytes);
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
         i += size_t(gridDim.x) * kThreads) {
      to[i] = from[i];
    }
  }
}

}  // namespace

Status LaunchCopyPage(const CopyPageArgs& args, cudaStream_t stream) {
  if (args.page_bytes % kVectorBytes != 0) {
    return InvalidArgument("page_bytes: " + std::to_string(args.page_bytes) +
                           " is not a multiple of 16");
  }
  if (args.layers < 1 || args.page_bytes == 0 || args.source == args.destination) {
    return Status::Ok();
  }
  const size_t vectors = args.page_bytes / kVectorBytes;
  const auto blocks =
      static_cast<unsigned>(std::min(kBlocksOfPage, (vectors + kThreads - 1) / kThreads));
  const auto layers = static_cast<unsigned>(std::min(args.layers, 65535));
  CopyPageKernel<<<dim3(blocks, layers), kThreads, 0, stream>>>(args);
  return CudaStatus(cudaGetLastError(), "copy_page kernel");
}

}  // namespace tributary::cuda
