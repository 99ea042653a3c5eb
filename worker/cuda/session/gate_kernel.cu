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

}  // namespace

absl::Status LaunchGate(const mailbox::Gate& gate, bool begins_early, cudaStream_t stream) {
  return FromCuda("launching a gate",
                  cuda::LaunchGrid(GateKernel, gate, {.clusters = 1, .begins_early = begins_early},
                                   32, /*shared_bytes=*/0, stream));
}

absl::Status LoadGate() {
  const void* kernels[] = {reinterpret_cast<const void*>(&GateKernel)};
  return ToAbsl(cuda::LoadKernels(kernels, "the gate of sessions"));
}

}  // namespace tributary::worker
