#include <algorithm>

#include "base/mailbox/gate.cuh"
#include "base/status/status_macros.h"
#include "kernels/cuda/launch/grid.h"
#include "kernels/cuda/launch/load_kernels.h"
#include "kernels/cuda/ptx/cluster.cuh"
#include "worker/cuda/session/gate_kernel.h"
#include "worker/cuda/status.h"
#include "worker/status_conversion.h"

namespace tributary::worker {
namespace {

__global__ void __launch_bounds__(32) GateKernel(const __grid_constant__ mailbox::Gate gate) {
  mailbox::SessionCounter counter;
  if (gate.layer > 0) counter = mailbox::CounterOf(gate);
  cuda::WaitForLaunchesAhead();
  if (gate.layer == 0) counter = mailbox::CounterOf(gate);
  if (threadIdx.x == 0) mailbox::PassGate(gate, counter, /*first=*/true);
  __syncwarp();
  cuda::LetNextLaunchBegin();
}

__global__ void __launch_bounds__(32) FinishKernel(const __grid_constant__ mailbox::Gate gate) {
  const mailbox::SessionCounter counter = mailbox::CounterOf(gate);
  cuda::WaitForLaunchesAhead();
  if (threadIdx.x != 0 || counter.failure != 0) return;
  mailbox::FinishLayer(gate, counter.first_count + static_cast<uint32_t>(gate.layer));
}

constexpr int kFetchThreads = 512;
// Vectors of 16 bytes that a thread has in flight.
constexpr int kFetchVectors = 4;
// A launch of no more blocks than this passes the gate itself. A larger one would keep too many
// multiprocessors from a host that computes here.
constexpr int64_t kMostGatedFetchBlocks = 8;
constexpr int64_t kMostFetchBlocks = 256;

// Vector `index` of all that is fetched: how many bytes from the slot's begin.
__device__ __forceinline__ size_t PlaceOfVector(const FetchArgs& args, size_t index) {
  size_t at = index * 16;
  if (at < args.bytes[0]) return args.layout.q + at;
  at -= args.bytes[0];
  if (at < args.bytes[1]) return args.layout.k + at;
  return args.layout.v + at - args.bytes[1];
}

template <bool kPassesGate>
__global__ void __launch_bounds__(kFetchThreads)
    FetchKernel(const __grid_constant__ FetchArgs args) {
  const mailbox::Gate& gate = args.gate;
  mailbox::SessionCounter counter;
  if (gate.layer > 0) counter = mailbox::CounterOf(gate);
  cuda::WaitForLaunchesAhead();
  if (gate.layer == 0) counter = mailbox::CounterOf(gate);
  if (kPassesGate) {
    if (threadIdx.x == 0) mailbox::PassGate(gate, counter, /*first=*/blockIdx.x == 0);
    __syncthreads();
  }
  const uint32_t count = counter.first_count + static_cast<uint32_t>(gate.layer);
  const std::byte* slot = args.mailbox + args.layout.SlotOf(count);
  const size_t all = (args.bytes[0] + args.bytes[1] + args.bytes[2]) / 16;
  const size_t threads = size_t{gridDim.x} * kFetchThreads;
  for (size_t first = size_t{blockIdx.x} * kFetchThreads + threadIdx.x; first < all;
       first += threads * kFetchVectors) {
    uint4 values[kFetchVectors];
#pragma unroll
    for (int i = 0; i < kFetchVectors; ++i) {
      const size_t index = first + i * threads;
      if (index >= all) break;
      values[i] = __ldcg(reinterpret_cast<const uint4*>(slot + PlaceOfVector(args, index)));
    }
#pragma unroll
    for (int i = 0; i < kFetchVectors; ++i) {
      const size_t index = first + i * threads;
      if (index >= all) break;
      *reinterpret_cast<uint4*>(args.to + PlaceOfVector(args, index)) = values[i];
    }
  }
  // The launch behind it may let another one begin, which does not wait for this one.
  mailbox::Fence(/*one_gpu=*/true);
  __syncthreads();
  cuda::LetNextLaunchBegin();
}

struct AnswerArgs {
  ProbeWords words;
  uint32_t first = 0;
  uint32_t last = 0;
  bool waits = false;
};

__global__ void __launch_bounds__(32) AnswerKernel(const __grid_constant__ AnswerArgs args) {
  if (threadIdx.x != 0) return;
  const ProbeWords& words = args.words;
  for (uint32_t round = args.first; round <= args.last; ++round) {
    if (args.waits && mailbox::Await(words.asked, round, words.status, words.bound,
                                     /*one_gpu=*/false) != mailbox::Awaited::kReached) {
      return;
    }
    mailbox::Ring(words.answered, round, /*one_gpu=*/false);
  }
}

absl::Status LaunchProbe(const AnswerArgs& args, cudaStream_t stream) {
  return FromCuda("answering a round trip", cuda::LaunchGrid(AnswerKernel, args, {.clusters = 1},
                                                             32, /*shared_bytes=*/0, stream));
}

}  // namespace

absl::Status LaunchGate(const mailbox::Gate& gate, bool begins_early, cudaStream_t stream) {
  return FromCuda("launching a gate",
                  cuda::LaunchGrid(GateKernel, gate, {.clusters = 1, .begins_early = begins_early},
                                   32, /*shared_bytes=*/0, stream));
}

absl::Status LaunchFetch(const FetchArgs& args, bool begins_early, cudaStream_t stream) {
  const auto vectors = static_cast<int64_t>((args.bytes[0] + args.bytes[1] + args.bytes[2]) / 16);
  constexpr int64_t kOfBlock = int64_t{kFetchThreads} * kFetchVectors;
  const int64_t blocks =
      std::clamp<int64_t>((vectors + kOfBlock - 1) / kOfBlock, 1, kMostFetchBlocks);
  const bool passes_gate = blocks <= kMostGatedFetchBlocks;
  if (!passes_gate) TRIBUTARY_RETURN_IF_ERROR(LaunchGate(args.gate, begins_early, stream));
  return FromCuda(
      "fetching a layer",
      cuda::LaunchGrid(passes_gate ? FetchKernel<true> : FetchKernel<false>, args,
                       {.clusters = static_cast<int32_t>(blocks), .begins_early = begins_early},
                       kFetchThreads, /*shared_bytes=*/0, stream));
}

absl::Status LaunchFinish(const mailbox::Gate& gate, bool begins_early, cudaStream_t stream) {
  return FromCuda(
      "finishing a layer",
      cuda::LaunchGrid(FinishKernel, gate, {.clusters = 1, .begins_early = begins_early}, 32,
                       /*shared_bytes=*/0, stream));
}

absl::Status LaunchAnswer(const ProbeWords& words, uint32_t round, cudaStream_t stream) {
  return LaunchProbe({.words = words, .first = round, .last = round}, stream);
}

absl::Status LaunchAnswers(const ProbeWords& words, uint32_t first, uint32_t last,
                           cudaStream_t stream) {
  return LaunchProbe({.words = words, .first = first, .last = last, .waits = true}, stream);
}

absl::Status LoadGate() {
  const void* kernels[] = {reinterpret_cast<const void*>(&GateKernel),
                           reinterpret_cast<const void*>(&FinishKernel),
                           reinterpret_cast<const void*>(&FetchKernel<true>),
                           reinterpret_cast<const void*>(&FetchKernel<false>),
                           reinterpret_cast<const void*>(&AnswerKernel)};
  return ToAbsl(cuda::LoadKernels(kernels, "the gate of sessions"));
}

}  // namespace tributary::worker
