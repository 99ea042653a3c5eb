#include <vector>

#include "collective/direct/direct_gather.cuh"
#include "collective/direct/direct_kernel.h"
#include "collective/direct/direct_merge.cuh"
#include "collective/direct/direct_protocol.cuh"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "kernels/cuda/status.h"

namespace tributary::collective {
namespace {

using cuda::LetNextLaunchBegin;
using cuda::WaitForLaunchesAhead;
using direct::Bookkeeping;
using direct::kMaxWorkers;
using direct::kWarp;
using direct::LoadWord;
using direct::PartialExchange;
using direct::ReceiveMerged;
using direct::SendMerged;
using direct::StoreWord;

// ---------------------------------------------------------------------------------------------
// Kernels

template <DType kIn, DType kWire, int kRanks, bool kArrives>
__global__ void __launch_bounds__(kMaxWorkers + kWarp, 1)
    DirectKernel(const __grid_constant__ DirectArgs a) {
  if (!kArrives) WaitForLaunchesAhead();
  const std::byte* own = a.memory[a.rank];
  const uint32_t step = LoadWord(own + a.layout.step(static_cast<int>(blockIdx.x)));
  PartialExchange<kIn, kWire, kRanks, kArrives> exchange(a, step);
  Bookkeeping books(a, step);
  const bool worker = threadIdx.x < blockDim.x - kWarp;
  bool usable = true;
  if (worker) {
    if (threadIdx.x < a.plan.units * (a.value_dim / exchange.kCount)) {
      usable = exchange.Fetch(threadIdx.x);
    }
  } else {
    usable = books.MayWrite();
  }
  // Who sends nothing need not wait for being allowed to; a failure reaches its waits.
  if (exchange.Sends() && __syncthreads_and(usable) == 0) {
    if (kArrives) WaitForLaunchesAhead();  // as at the end
    return;
  }
  if (!worker) {
    if (usable && exchange.SendLse()) books.TellPeers();
    return;
  }
  exchange.SendAll();
  LetNextLaunchBegin();
  exchange.ReceiveAndMerge();
  if (a.plan.route == DirectRoute::kTwoHops && a.rank == 0) ReceiveMerged<kRanks>(a, step);
  // What comes after this launch comes after the one ahead of it, too.
  if (kArrives) WaitForLaunchesAhead();
}

template <int kRanks>
__global__ void __launch_bounds__(kMaxWorkers + kWarp, 1)
    DirectGatherKernel(const __grid_constant__ DirectArgs a) {
  WaitForLaunchesAhead();
  const uint32_t step = LoadWord(a.memory[a.rank] + a.layout.step(static_cast<int>(blockIdx.x)));
  Bookkeeping books(a, step);
  const bool worker = threadIdx.x < blockDim.x - kWarp;
  const bool usable = worker || books.MayWrite();
  if (__syncthreads_and(usable) == 0) return;
  if (!worker) {
    books.TellPeers();
    return;
  }
  SendMerged(a, step);
  LetNextLaunchBegin();
  if (a.rank == 0) ReceiveMerged<kRanks>(a, step);
}

__global__ void StoreIfZeroKernel(const __grid_constant__ PeerWords words) {
  std::byte* at = words.at[threadIdx.x];
  if (at != nullptr && LoadWord(at) == 0) StoreWord(at, words.value[threadIdx.x]);
}

// ---------------------------------------------------------------------------------------------
// Launching

using Kernel = void (*)(DirectArgs);

template <DType kIn, DType kWire, bool kArrives = false>
Kernel KernelFor(int ranks) {
  return ranks <= 4 ? DirectKernel<kIn, kWire, 4, kArrives>
                    : DirectKernel<kIn, kWire, kMaxDirectRanks, kArrives>;
}

Kernel GatherKernelFor(int ranks) {
  return ranks <= 4 ? DirectGatherKernel<4> : DirectGatherKernel<kMaxDirectRanks>;
}

template <bool kArrives>
Kernel KernelFromF32(DType wire, int ranks) {
  if (wire == DType::kF32) return KernelFor<DType::kF32, DType::kF32, kArrives>(ranks);
  if (wire == DType::kBf16) return KernelFor<DType::kF32, DType::kBf16, kArrives>(ranks);
  return KernelFor<DType::kF32, DType::kF16, kArrives>(ranks);
}

Kernel KernelOf(DType o, DType wire, int ranks, bool arrives) {
  if (arrives) return KernelFromF32<true>(wire, ranks);
  if (o == DType::kF32) return KernelFromF32<false>(wire, ranks);
  if (wire == DType::kBf16) return KernelFor<DType::kBf16, DType::kBf16>(ranks);
  return KernelFor<DType::kF16, DType::kF16>(ranks);
}

}  // namespace

void SetHeads(DirectArgs* args) {
  const int32_t ranks = args->layout.ranks;
  for (int r = 0; r <= kMaxDirectRanks; ++r) {
    args->first_head[r] =
        r < ranks ? DirectSlice(args->plan.route, args->heads, ranks, r).begin : args->heads;
  }
}

Status LaunchDirect(const DirectArgs& args, DType o_dtype, DType wire, bool overlap_launch,
                    cudaStream_t stream) {
  const Kernel kernel = args.plan.route == DirectRoute::kGather
                            ? GatherKernelFor(args.layout.ranks)
                            : KernelOf(o_dtype, wire, args.layout.ranks, args.partial_arrives);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args.plan.blocks);
  config.blockDim = dim3(args.plan.movers + kWarp);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap_launch ? 1 : 0;
  return cuda::CudaStatus(cudaLaunchKernelEx(&config, kernel, args), "direct exchange");
}

Status LaunchStoreIfZero(const PeerWords& words, cudaStream_t stream) {
  StoreIfZeroKernel<<<1, kMaxDirectRanks, 0, stream>>>(words);
  return cuda::CudaStatus(cudaGetLastError(), "telling peers");
}

Status LoadDirectKernels() {
  std::vector<const void*> kernels = {
      reinterpret_cast<const void*>(GatherKernelFor(4)),
      reinterpret_cast<const void*>(GatherKernelFor(kMaxDirectRanks)),
      reinterpret_cast<const void*>(StoreIfZeroKernel)};
  for (const DType wire : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const int ranks : {4, kMaxDirectRanks}) {
      kernels.push_back(reinterpret_cast<const void*>(KernelOf(wire, wire, ranks, false)));
      for (const bool arrives : {false, true}) {
        kernels.push_back(
            reinterpret_cast<const void*>(KernelOf(DType::kF32, wire, ranks, arrives)));
      }
    }
  }
  return cuda::LoadKernels(kernels, "the direct exchange");
}

}  // namespace tributary::collective
