// The CUDA backend on one rank. In every build: where CUDA is missing, making one says so.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/exchange/exchange.h"
#include "worker/backend.h"
#include "worker/exchange_choice.h"

namespace tributary::worker {

struct CudaBackendOptions {
  int gpu = 0;  // CUDA's ordinal in this process
  collective::Strategy strategy = collective::Strategy::kAuto;
  // Where partials of several ranks meet. The same on every rank.
  ExchangePlace exchange = ExchangePlace::kHost;
  // Told how they do when a group formed, in words for people, whenever that is news. On the thread
  // that joins.
  std::function<void(const std::string& how)> on_exchange;
  // Results of a sequence do not depend on what shares its batch, to the bit.
  bool batch_invariant = false;
  // Leaves out kernels that only one architecture has. For tests.
  bool portable = false;
  // Threads that take host memory for pages of other ranks, and copy and check pages that travel.
  int copy_threads = 2;
  // Steps that repeat are captured in CUDA graphs.
  bool graphs = true;
};

// kFailedPrecondition: this build has no CUDA, the machine has no such GPU, or the GPU is too old.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

// Whether GPUs [first, first + count) of this process can exchange so: OK for every strategy that
// the host has as well. kFailedPrecondition: it is `direct`, and they do not reach each other's
// memory.
absl::Status CheckGpuExchange(collective::Strategy strategy, int first, int count);

// GPUs that this process sees. kFailedPrecondition: this build has no CUDA, or there is no driver.
absl::StatusOr<int> CountGpus();

// OK when GPUs [first, first + count) are there and new enough for the backend; else the reason.
absl::Status CheckGpus(int first, int count);

// Pins host memory of this process, whole pages, so that its GPUs copy from and to it by
// themselves, until the last copy of the result is gone. `gpu` is one of them. Null: this build has
// no CUDA, or the system refuses. On any thread.
std::shared_ptr<const void> PinHostMemory(int gpu, std::byte* data, size_t bytes);

// Sets what CUDA reads from the environment when a process first uses a GPU, where it is not set
// yet. First thing in a program, while it has one thread.
//
// CUDA_MODULE_LOADING=EAGER: all kernels are loaded at once, not each at its first launch. That may
// wait for a kernel that waits for a peer (kernels/cuda/launch/load_kernels.h).
// CUDA_DEVICE_MAX_CONNECTIONS=32, the most there are: streams that share a queue of the GPU wait
// for each other, and with that for the hosts of sessions (kMostDeviceSessions).
void SetCudaEnvironment();

}  // namespace tributary::worker
