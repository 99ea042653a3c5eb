// One rank's end of a group of GPUs, for one epoch: the exchange of partials that lie in device
// memory, over NCCL or straight into peers' memory, whichever the ranks have.
//
//   DeviceGroupOptions options{.rank = r, .size = n, .epoch = e, .device = d};
//   options.limits = {.rows = 512, .heads = 32, .value_dim = 128};
//   std::unique_ptr<DeviceGroup> group;
//   Status s = CreateDeviceGroup(options, rendezvous, deadline, &group);   // all ranks
//   s = group->Exchange(params, stream);        // enqueues; may be captured in a CUDA graph
//   s = group->Await(stream, deadline);         // host: done, or the group is broken
//
// Exchange and GatherSlices are entered by all ranks in the same order with the same shapes, on one
// stream a rank at a time. After an error the group is broken for good: destroy it on every rank
// and create the next one under a new epoch. Destroying never waits longer than a moment.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "collective/communicator.h"
#include "collective/device/device_exchange.h"
#include "collective/direct/direct_layout.h"
#include "collective/group/device_choice.h"  // IWYU pragma: export
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

class DeviceCommunicator;
class RetiredMemory;

enum class Wanted : uint8_t { kNo, kIfPossible, kYes };

struct DeviceGroupOptions {
  int rank = 0;
  int size = 1;
  // Used once: after a failure the next attempt takes a new one.
  uint64_t epoch = 0;
  int device = 0;  // CUDA ordinal in this process
  // What calls may be as large as; memory is taken at creation, for this shape.
  DeviceExchangeLimits limits;
  // kYes: no group without it. A group without both is refused, unless its size is 1. Every rank
  // wants the same, and what one of them lacks none of them uses.
  Wanted nccl = Wanted::kIfPossible;
  Wanted direct = Wanted::kIfPossible;
  // How long a direct exchange waits, on the GPU, for a peer that does not come. Below any deadline
  // that Await is given.
  std::chrono::milliseconds direct_bound{2000};
  DirectTuning direct_tuning;  // alike on every rank
  // Where direct buffers of earlier epochs wait until no peer can write to them any more
  // (collective/direct/retired_memory.h). Shared by all groups that a rank makes one after the
  // other. A group without one waits for a moment when it goes, and then leaks what a peer might
  // still write.
  std::shared_ptr<RetiredMemory> retired;
};

class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual uint64_t epoch() const = 0;
  // What the strategies are chosen from; `no_direct` and `no_nccl` say why one is missing.
  virtual const DeviceExchangeCapability& capability() const = 0;

  // Merges the partials of all ranks (device_exchange.h). kInvalidArgument and kFailedPrecondition
  // name the field or the reasons, enqueue nothing and leave the group as it was.
  virtual Status Exchange(const DeviceExchangeParams& params, cudaStream_t stream) = 0;
  // The inverse of scattering: the heads of all ranks come to rank 0.
  virtual Status GatherSlices(const DeviceGatherParams& params, cudaStream_t stream) = 0;
  // Other collectives, such as a broadcast; null without NCCL.
  virtual DeviceCommunicator* communicator() = 0;

  // Waits until the stream has done what was enqueued before the call. An error (of this rank, or
  // noticed on a peer) means: what the stream computed since the last Await is not to be used.
  virtual Status Await(cudaStream_t stream, Deadline deadline) = 0;
  virtual Status Health() = 0;
  // A word in this rank's GPU that is not 0 once an exchange has failed. Kernels that come later in
  // the stream read it. Null where exchanges go by NCCL.
  virtual const uint32_t* failure_word() const = 0;
  // From any thread. What is enqueued, here and on peers that can be reached, ends soon.
  virtual void Abort(const std::string& reason) = 0;
};

// Returns when all ranks did or the deadline passed. Ranks may be threads of a process (a
// MemoryRendezvous will do) or processes, one GPU each. Keys carry the epoch.
Status CreateDeviceGroup(const DeviceGroupOptions& options, Rendezvous& rendezvous,
                         Deadline deadline, std::unique_ptr<DeviceGroup>* out);

}  // namespace tributary::collective
