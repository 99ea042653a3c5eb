#include "base/mailbox/gate.cuh"
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
                           reinterpret_cast<const void*>(&AnswerKernel)};
  return ToAbsl(cuda::LoadKernels(kernels, "the gate of sessions"));
}

}  // namespace tributary::worker
