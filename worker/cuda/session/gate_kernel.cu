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

using mailbox::Gate;
using mailbox::SharedGate;

template <typename AnyGate>
__global__ void __launch_bounds__(32) GateKernel(const __grid_constant__ AnyGate gate) {
  mailbox::SessionCounter counter;
  if (gate.layer > 0) counter = mailbox::CounterOf(gate);
  cuda::WaitForLaunchesAhead();
  if (gate.layer == 0) counter = mailbox::CounterOf(gate);
  if (threadIdx.x == 0) {
    mailbox::PassGate(gate, counter, /*first=*/true);
    // What begins behind this launch waits for its end. (But the count is never far behind.)
    if (gate.layer < gate.layers) {
      mailbox::Store(&gate.counter->passed,
                     counter.first_count + static_cast<uint32_t>(gate.layer) + 1);
    }
  }
  __syncwarp();
  cuda::LetNextLaunchBegin();
}

template <typename AnyGate>
__global__ void __launch_bounds__(32) FinishKernel(const __grid_constant__ AnyGate gate) {
  const mailbox::SessionCounter counter = mailbox::CounterOf(gate);
  cuda::WaitForLaunchesAhead();
  if (threadIdx.x != 0 || counter.failure != 0) return;
  mailbox::FinishLayer(gate, counter.first_count + static_cast<uint32_t>(gate.layer));
}

__global__ void __launch_bounds__(32) StampKernel(const __grid_constant__ SharedGate gate) {
  if (threadIdx.x != 0) return;
  const mailbox::SessionCounter counter = mailbox::CounterOf(gate);
  const uint32_t count = counter.first_count + static_cast<uint32_t>(gate.layer);
  mailbox::StampsOf(gate, count)->attended = mailbox::Nanoseconds();
}

constexpr int kFetchThreads = 512;
// Vectors of 16 bytes that a thread has in flight.
constexpr int kFetchVectors = 4;
// A launch of no more blocks than this passes the gate itself. A larger one would keep too many
// multiprocessors from a host that computes here.
constexpr int64_t kMostGatedFetchBlocks = 8;
constexpr int64_t kMostFetchBlocks = 256;

// FetchArgs as a launch has them that passes such gates.
template <typename AnyGate>
struct FetchLaunch {
  AnyGate gate;
  mailbox::Layout layout;
  const std::byte* mailbox;
  std::byte* to;
  size_t bytes[3];
};

// Vector `index` of all that is fetched: how many bytes from the slot's begin.
template <typename AnyGate>
__device__ __forceinline__ size_t PlaceOfVector(const FetchLaunch<AnyGate>& args, size_t index) {
  size_t at = index * 16;
  if (at < args.bytes[0]) return args.layout.q + at;
  at -= args.bytes[0];
  if (at < args.bytes[1]) return args.layout.k + at;
  return args.layout.v + at - args.bytes[1];
}

template <bool kPassesGate, typename AnyGate>
__global__ void __launch_bounds__(kFetchThreads)
    FetchKernel(const __grid_constant__ FetchLaunch<AnyGate> args) {
  const AnyGate& gate = args.gate;
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

// Calls launch(gate) with the gate as the kind that it is.
template <typename Launch>
cudaError_t WithKind(const SharedGate& gate, const Launch& launch) {
  return gate.is_shared() ? launch(gate) : launch(static_cast<const Gate&>(gate));
}

template <typename AnyGate>
cudaError_t LaunchFetchOf(const FetchArgs& from, const AnyGate& gate, int64_t blocks,
                          bool passes_gate, bool begins_early, cudaStream_t stream) {
  const FetchLaunch<AnyGate> args{.gate = gate,
                                  .layout = from.layout,
                                  .mailbox = from.mailbox,
                                  .to = from.to,
                                  .bytes = {from.bytes[0], from.bytes[1], from.bytes[2]}};
  return cuda::LaunchGrid(passes_gate ? FetchKernel<true, AnyGate> : FetchKernel<false, AnyGate>,
                          args,
                          {.clusters = static_cast<int32_t>(blocks), .begins_early = begins_early},
                          kFetchThreads, /*shared_bytes=*/0, stream);
}

}  // namespace

absl::Status LaunchGate(const SharedGate& gate, bool begins_early, cudaStream_t stream) {
  return FromCuda("launching a gate", WithKind(gate, [&]<typename G>(const G& g) {
                    return cuda::LaunchGrid(GateKernel<G>, g,
                                            {.clusters = 1, .begins_early = begins_early}, 32,
                                            /*shared_bytes=*/0, stream);
                  }));
}

absl::Status LaunchFetch(const FetchArgs& args, bool begins_early, cudaStream_t stream) {
  const auto vectors = static_cast<int64_t>((args.bytes[0] + args.bytes[1] + args.bytes[2]) / 16);
  constexpr int64_t kOfBlock = int64_t{kFetchThreads} * kFetchVectors;
  const int64_t blocks =
      std::clamp<int64_t>((vectors + kOfBlock - 1) / kOfBlock, 1, kMostFetchBlocks);
  const bool passes_gate = blocks <= kMostGatedFetchBlocks;
  if (!passes_gate) TRIBUTARY_RETURN_IF_ERROR(LaunchGate(args.gate, begins_early, stream));
  return FromCuda("fetching a layer", WithKind(args.gate, [&](const auto& gate) {
                    return LaunchFetchOf(args, gate, blocks, passes_gate, begins_early, stream);
                  }));
}

absl::Status LaunchFinish(const SharedGate& gate, bool begins_early, cudaStream_t stream) {
  return FromCuda("finishing a layer", WithKind(gate, [&]<typename G>(const G& g) {
                    return cuda::LaunchGrid(FinishKernel<G>, g,
                                            {.clusters = 1, .begins_early = begins_early}, 32,
                                            /*shared_bytes=*/0, stream);
                  }));
}

absl::Status LaunchStamp(const SharedGate& gate, cudaStream_t stream) {
  return FromCuda("timing a layer", cuda::LaunchGrid(StampKernel, gate, {.clusters = 1}, 32,
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
  const void* kernels[] = {reinterpret_cast<const void*>(&GateKernel<Gate>),
                           reinterpret_cast<const void*>(&GateKernel<SharedGate>),
                           reinterpret_cast<const void*>(&FinishKernel<Gate>),
                           reinterpret_cast<const void*>(&FinishKernel<SharedGate>),
                           reinterpret_cast<const void*>(&FetchKernel<true, Gate>),
                           reinterpret_cast<const void*>(&FetchKernel<true, SharedGate>),
                           reinterpret_cast<const void*>(&FetchKernel<false, Gate>),
                           reinterpret_cast<const void*>(&FetchKernel<false, SharedGate>),
                           reinterpret_cast<const void*>(&StampKernel),
                           reinterpret_cast<const void*>(&AnswerKernel)};
  return ToAbsl(cuda::LoadKernels(kernels, "the gate of sessions"));
}

}  // namespace tributary::worker
