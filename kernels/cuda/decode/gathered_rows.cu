#include "base/cuda/early_launch.cuh"
#include "kernels/cuda/decode/gathered_rows.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/status.h"
#include "kernels/lse.h"

namespace tributary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDims = 4;  // of a thread that merges

// A thread takes 16 bytes.
__global__ void __launch_bounds__(kThreads)
    GatherQueriesKernel(const __grid_constant__ GatherQueriesArgs args) {
  const int unit = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int gathered = unit / args.row_vectors;
  const int vector = unit - gathered * args.row_vectors;
  // The list is part of the plan, which only copies write.
  const int row = gathered < args.gathered_rows ? __ldg(args.rows + gathered) : -1;
  // In this order: who begins behind it counts on all that is ahead (AttentionArgs::late_strips).
  WaitForLaunchesAhead();
  LetNextLaunchBegin();
  if (row < 0) return;
  args.to[size_t(gathered) * args.row_vectors + vector] =
      args.from[size_t(row) * args.row_vectors + vector];
}

// value_dim / 4 neighbouring threads merge one head of one row, all of them in one thread block.
// The rest comes first, then the row's runs as they are listed.
__global__ void __launch_bounds__(kThreads)
    MergeGatheredKernel(const __grid_constant__ MergeGatheredArgs args) {
  constexpr int kHeld = 4;  // partials that are asked for at once
  const int threads = args.value_dim / kDims;
  const int unit = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int at = unit / threads;
  const int d = unit % threads * kDims;
  const int row = at / args.heads;
  const int head = at - row * args.heads;
  LetNextLaunchBegin();
  // The lists are part of the plan, which only copies write.
  RowParts parts;
  if (row < args.rows) parts = args.parts[row];
  const int count = parts.count;
  const int32_t* const part_rows = args.part_rows + parts.begin;
  int at_part[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    at_part[i] = i < count ? part_rows[i] * args.heads + head : 0;
  }
  WaitForLaunchesAhead();
  // (A partial without keys has an output of zeros.)
  float4 o[kHeld + 1] = {};
  float lse[kHeld + 1];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    lse[i] = EmptyLse<float>();
    if (i >= count) continue;
    lse[i] = args.gathered_lse[at_part[i]];
    o[i] =
        *reinterpret_cast<const float4*>(args.gathered_o + size_t(at_part[i]) * args.value_dim + d);
  }
  lse[kHeld] = EmptyLse<float>();
  float* const own_o = args.o + size_t(at) * args.value_dim + d;
  if (count > 0) {
    lse[kHeld] = args.lse[at];
    o[kHeld] = *reinterpret_cast<const float4*>(own_o);
  }
  UnionLse<float> of_all;
  float4 sum = {};
  const auto add = [&](float of_part, const float4& x) {
    const float weight = of_all.WeightOf(of_part);
    if (weight == 0.0f) return;  // without keys: nothing is asked of its output
    of_all.Add(weight);
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
  };
#pragma unroll
  for (const float of_part : lse) of_all.See(of_part);
  for (int i = kHeld; i < count; ++i)
    of_all.See(args.gathered_lse[part_rows[i] * args.heads + head]);
  add(lse[kHeld], o[kHeld]);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) add(lse[i], o[i]);
  for (int i = kHeld; i < count; ++i) {
    const int from = part_rows[i] * args.heads + head;
    add(args.gathered_lse[from],
        *reinterpret_cast<const float4*>(args.gathered_o + size_t(from) * args.value_dim + d));
  }
  __syncthreads();  // the LSE of the rest is read by the other threads of the row and head
  if (count <= 0) return;
  const float scale = of_all.Scale();
  *reinterpret_cast<float4*>(own_o) =
      make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
  if (d == 0) args.lse[at] = of_all.Lse();
}

}  // namespace

Status LaunchGatherQueries(const GatherQueriesArgs& args, bool begins_early, cudaStream_t stream) {
  if (args.row_vectors < 1) return InvalidArgument("row_vectors: must be positive");
  const int64_t units = int64_t{args.gathered_rows} * args.row_vectors;
  if (units == 0) return Status::Ok();
  const Grid grid{.clusters = static_cast<int32_t>((units + kThreads - 1) / kThreads),
                  .begins_early = begins_early};
  return CudaStatus(LaunchGrid(GatherQueriesKernel, args, grid, kThreads, 0, stream),
                    "gather queries");
}

Status LaunchMergeGathered(const MergeGatheredArgs& args, bool begins_early, cudaStream_t stream) {
  const int threads = args.value_dim / kDims;
  if (threads < 1 || threads > kThreads || args.value_dim % kDims != 0) {
    return InvalidArgument("value_dim: is not a multiple of 4 up to 1024");
  }
  // Whole rows to a thread block, so that its barrier is a barrier of the row.
  const int block = kThreads / threads * threads;
  const int64_t units = int64_t{args.rows} * args.heads * threads;
  if (units == 0) return Status::Ok();
  const Grid grid{.clusters = static_cast<int32_t>((units + block - 1) / block),
                  .begins_early = begins_early};
  return CudaStatus(LaunchGrid(MergeGatheredKernel, args, grid, block, 0, stream),
                    "merge gathered rows");
}

}  // namespace tributary::cuda
