#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/merge_pieces.h"

namespace tributary::cuda {
namespace {

constexpr int kWarps = 8;

// Block (job, y) takes columns 8 y .. 8 y + 7 of every gridDim.x-th job that was cut.
template <int kHeadDim, int kColumns>
__global__ void __launch_bounds__(32 * kWarps)
    MergePiecesKernel(const __grid_constant__ AttentionArgs args) {
  const int count = args.cut_items[0];
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const WorkItem& item = args.items[args.cut_items[1 + i]];
    const int column = blockIdx.y * 8 + threadIdx.x / 32;
    if (column >= item.column_count) continue;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 64) MergeColumn<kHeadDim, kColumns>(args, item, column, d);
  }
}

}  // namespace

template <int kHeadDim, int kColumns>
cudaError_t RunMergePieces(const AttentionArgs& args, int cut_jobs, cudaStream_t stream) {
  MergePiecesKernel<kHeadDim, kColumns>
      <<<dim3(cut_jobs, kColumns / kWarps), 32 * kWarps, 0, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t RunMergePieces<64, 32>(const AttentionArgs&, int, cudaStream_t);
template cudaError_t RunMergePieces<64, 64>(const AttentionArgs&, int, cudaStream_t);
template cudaError_t RunMergePieces<128, 32>(const AttentionArgs&, int, cudaStream_t);
template cudaError_t RunMergePieces<128, 64>(const AttentionArgs&, int, cudaStream_t);
template cudaError_t RunMergePieces<256, 32>(const AttentionArgs&, int, cudaStream_t);

}  // namespace tributary::cuda
