// Exchange over memory that all ranks of a group can write: the host's side of direct_kernel.h. It
// maps the memory of peers, launches the kernel, notices failures, and frees its own memory only
// when no peer can write to it any more.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "collective/device/device_exchange.h"
#include "collective/direct/direct_layout.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

class RetiredMemory;

struct DirectOptions {
  int rank = 0;
  int size = 1;
  uint64_t epoch = 0;
  int device = 0;
  DirectLayout layout;
  std::chrono::milliseconds bound{2000};
  std::shared_ptr<RetiredMemory> retired;  // may be null: what cannot be freed is then leaked
};

class DirectExchange {
 public:
  virtual ~DirectExchange() = default;

  // Both only enqueue. `plan` is what PlanDirect gave for the shape of `params`.
  virtual Status Exchange(const DeviceExchangeParams& params, const DirectPlan& plan,
                          bool overlap_launch, cudaStream_t stream) = 0;
  virtual Status Gather(const DeviceGatherParams& params, const DirectPlan& plan,
                        bool overlap_launch, cudaStream_t stream) = 0;

  // The first failure that the GPU has reported so far. Does not wait.
  virtual Status Health() = 0;
  // A word in this rank's GPU that is not 0 once an exchange has failed. Kernels that come later in
  // the stream read it: what was merged is not to be used then.
  virtual const uint32_t* failure_word() const = 0;
  // May be called from any thread. Exchanges under way or enqueued end at once, here and on peers.
  virtual void Abort() = 0;
};

// Called by all ranks. When the ranks cannot reach each other's memory, all of them get OK, no
// exchange and the reason. An error is the rendezvous': a rank did not come.
//
// The streams it was used on must have drained before it is destroyed.
Status CreateDirectExchange(const DirectOptions& options, Rendezvous& rendezvous, Deadline deadline,
                            std::unique_ptr<DirectExchange>* out, std::string* why_not);

}  // namespace tributary::collective
