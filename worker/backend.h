// The seam between what all devices share and what each does its own way.
//
// Commands, page tables, checks, plans and epochs are the executor's, and the order of a step's
// operations is the wrappers'. A backend brings the memory of the pages and the operations
// (step_operations.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status/errors.h"
#include "collective/communicator.h"
#include "collective/rendezvous/rendezvous.h"
#include "worker/backends.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/step_operations.h"
#include "worker/step_run.h"

namespace tributary::worker {

enum class PageFill : uint8_t {
  kZero,
  // Every byte 0xff, which is a NaN in each KV dtype: a read of a slot that was never written
  // shows.
  kPoison,
};

// One rank's share of one cache.
class Shard {
 public:
  virtual ~Shard() = default;

  // Bytes that the pages take.
  virtual size_t bytes() const = 0;

  // Copies pages in order, each in all layers. The ids must exist.
  virtual absl::Status CopyPages(const std::vector<PageCopy>& copies) = 0;

  // Runs a step (RunStep) and waits for its results. An error leaves the group in need of a new
  // epoch; kDataLoss: what the shard held is gone.
  virtual absl::Status Run(const PlannedStep& step, StepResults* results) = 0;
};

// Of one rank; outlives its shards. Used from one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual const BackendCapabilities& capabilities() const = 0;

  // Bytes that the device would still give.
  virtual size_t AvailableMemory() const = 0;

  // Called by all ranks at once when they form a group, `comm` connecting them: makes what else the
  // device needs in order to exchange. Returns the communicator to use from then on: `comm`, or one
  // that also aborts what was made. `rendezvous` is of the epoch. An error (kFailedPrecondition:
  // what was asked for is not there) means that the rank is in no group.
  virtual absl::StatusOr<std::unique_ptr<collective::Communicator>> Join(
      std::unique_ptr<collective::Communicator> comm, collective::Rendezvous& rendezvous,
      collective::Deadline deadline) {
    static_cast<void>(rendezvous);
    static_cast<void>(deadline);
    return comm;
  }
  // Lets go of what Join made; the group that it was for is over.
  virtual void Leave() {}
  // Whether taking or giving back memory of the device may hold up peers. Then ranks wait for each
  // other after they did.
  virtual bool MemoryHoldsUpPeers() const { return false; }

  // Takes the memory at once. kResourceExhausted, with the sizes, when it needs more than
  // `available` bytes or the device refuses. The spec is valid.
  virtual absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec,
                                                             size_t available, PageFill fill) = 0;

  // Makes memory that another process shares usable in steps, as `region`. Again with the same
  // memory: OK. Errors name fields of CudaIpcMemory (attention.proto): kFailedPrecondition: this
  // backend or its device cannot reach such memory.
  virtual absl::Status OpenRegion(RegionId region, const SharedDeviceMemory& memory) {
    static_cast<void>(region);
    static_cast<void>(memory);
    return FieldError(absl::StatusCode::kFailedPrecondition, "cuda_ipc",
                      "these workers do not reach the memory of GPUs");
  }
  // Lets go of it, if it is open. An error leaves it open.
  virtual absl::Status CloseRegion(RegionId region, collective::Deadline deadline) {
    static_cast<void>(region);
    static_cast<void>(deadline);
    return absl::OkStatus();
  }
  // Whether all of `part` lies in an open region.
  virtual bool Reaches(const RegionPart& part) const {
    static_cast<void>(part);
    return false;
  }
};

}  // namespace tributary::worker
