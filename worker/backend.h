// The seam between what all devices share and what each does its own way.
//
// Commands, page tables, checks, plans and epochs are the executor's, and the order of a step's
// operations is the wrappers'. A backend brings the memory of the pages and the operations
// (step_operations.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
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

  // Takes missing memory until all is there (true) or the time `until` has come (false). Commands
  // for other caches may come in between, steps may not. After an error the shard is of no use.
  virtual absl::StatusOr<bool> TakeMemory(std::chrono::steady_clock::time_point until) {
    static_cast<void>(until);
    return true;
  }

  // Copies pages in order, each in all layers. The ids must exist.
  virtual absl::Status CopyPages(const std::vector<PageCopy>& copies) = 0;

  // Takes the memory whose size grows with the step, so that Run needs no more of it.
  // kResourceExhausted: there is not enough, and the step must not be run.
  virtual absl::Status Reserve(const PlannedStep& step) {
    static_cast<void>(step);
    return absl::OkStatus();
  }

  // The functions below serve replicas (worker/replica.h). Backends that keep any have them
  // (BackendCapabilities::replicas). Reads and writes pages of all layers, in the backend's order
  // of bytes: [pages][page_bytes]. The ids must exist.
  virtual size_t page_bytes() const { return 0; }
  virtual absl::Status ReadPages(std::span<const int32_t> pages, std::byte* out);
  virtual absl::Status WritePages(std::span<const int32_t> pages, const std::byte* in);

  // Reads and writes runs of `slots` slots that begin at these ones, in all layers:
  // [runs][run_bytes(slots)]. `slots` divides the page size, and the runs begin at multiples of it.
  // Runs of whole pages are in the backend's order of bytes.
  virtual size_t run_bytes(int32_t slots) const {
    static_cast<void>(slots);
    return 0;
  }
  virtual absl::Status ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out);
  virtual absl::Status WriteRuns(std::span<const int64_t> first, int32_t slots,
                                 const std::byte* in);

  // Runs a step (RunStep), writes the tokens that its replica keeps, and waits for its results. An
  // error leaves the group in need of a new epoch; kDataLoss: what the shard held is gone.
  virtual absl::Status Run(const PlannedStep& step, StepResults* results) = 0;
};

// How far a session has come.
struct SessionNews {
  SessionId session = 0;
  int32_t rank = 0;    // the rank that tells it
  uint32_t ended = 0;  // its layers that were carried out, modulo 2^32
  // Why the session is over: a wait for the host was in vain (kDeadlineExceeded), it was told to
  // end (kAborted), or the device failed (kDataLoss). Nothing of it runs any more.
  absl::Status status;
  // Entries (by index) of steps that ended whose repeated tokens differ from what is held: the
  // session's number of the step's first layer, and the entry.
  std::vector<std::pair<uint32_t, int32_t>> conflicts;
};
// Called on a thread of the backend, one call at a time for each session.
using OnSessionNews = std::function<void(const SessionNews&)>;

// A session whose mailbox lies in a device's memory. Only End is called from other threads, too.
class DeviceSession {
 public:
  virtual ~DeviceSession() = default;  // ends it, and waits until nothing of it runs

  virtual const DeviceMailbox& mailbox() const = 0;

  // A layer's tensors in the slot of layer number `count`, for so many rows and tokens.
  struct SlotTensors {
    TensorView q;
    TensorView k;
    TensorView v;
  };
  virtual SlotTensors TensorsOf(const LayerGeometry& geometry, uint32_t count, int32_t rows,
                                int32_t tokens) const = 0;

  // Puts copies of pages into the session's stream, ahead of the next step.
  virtual absl::Status CopyPages(Shard& shard, const std::vector<PageCopy>& copies) = 0;
  // Puts the layers of a step into the session's stream, each behind its doorbell, without waiting.
  // Layer i of `layers` is the session's number first_count + i and belongs to shards[i].
  // Everything but the shards may go when this returns.
  virtual absl::Status Enqueue(std::span<const PlannedStep> layers, std::span<Shard* const> shards,
                               uint32_t first_count, Waiting waiting) = 0;

  // Ends every wait of both sides. The host finds `status`, a google.rpc.Code that is not 0. May be
  // called from any thread.
  virtual void End(int32_t status) = 0;
};

// So many sessions may have their mailbox on one GPU at once. Each has two streams, and two streams
// that share one of the GPU's 32 queues wait for each other.
inline constexpr int kMostDeviceSessions = 15;

// What one rank computes with, one thread at a time. It outlives its shards and its sessions.
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

  // Takes the memory, or claims it for Shard::TakeMemory. kResourceExhausted, with the sizes, when
  // it needs more than `available` bytes or the device refuses. The spec is valid.
  virtual absl::StatusOr<std::unique_ptr<Shard>> CreateShard(const CacheSpec& spec,
                                                             size_t available, PageFill fill) = 0;

  // Whether replicas lie in other memory than shards, and how many bytes that would still give.
  virtual bool ReplicasApart() const { return false; }
  virtual size_t AvailableForReplicas() const { return AvailableMemory(); }
  // Makes a shard in host memory for pages that are kept for another rank. They have the bytes that
  // that rank's own shard gives and takes (ReadPages, WritePages). Steps that have it as their
  // replica write to it.
  virtual absl::StatusOr<std::unique_ptr<Shard>> CreateReplica(const CacheSpec& spec,
                                                               size_t available, PageFill fill);

  // Calls body(part) once for every part in [0, parts), on the threads that the rank has for work
  // on host memory, and returns when all are done.
  virtual void Spread(int parts, const std::function<void(int part)>& body) {
    for (int part = 0; part < parts; ++part) body(part);
  }
  // Lets the device copy from and to host memory, whole pages, by itself, until the last copy of
  // the result is gone. Null: it cannot, or has no use for that.
  virtual std::shared_ptr<const void> PinHost(std::byte* data, size_t bytes) {
    static_cast<void>(data);
    static_cast<void>(bytes);
    return nullptr;
  }

  // Opens a session (OpenSessionCommand). All ranks of `comm` call this at once; either all of them
  // get a session, or none does. kFailedPrecondition, open.memory: this backend has no such
  // sessions, or not in the group as it is. kResourceExhausted: no room for the mailbox. Any other
  // error means that the group is broken. `news` is called until the session is destroyed.
  virtual absl::StatusOr<std::unique_ptr<DeviceSession>> OpenSession(
      const OpenSessionCommand& command, collective::Communicator& comm,
      collective::Deadline deadline, OnSessionNews news) {
    static_cast<void>(command);
    static_cast<void>(comm);
    static_cast<void>(deadline);
    static_cast<void>(news);
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.memory",
                      "these workers have no GPU for a mailbox to lie on");
  }

  // Makes memory that another process shares usable in steps, as `region`. A second call with the
  // same memory is OK. Errors name fields of CudaIpcMemory (attention.proto). kFailedPrecondition:
  // this backend or its device cannot reach such memory.
  virtual absl::Status OpenRegion(RegionId region, const SharedDeviceMemory& memory) {
    static_cast<void>(region);
    static_cast<void>(memory);
    return FieldError(absl::StatusCode::kFailedPrecondition, "cuda_ipc",
                      "these workers do not reach the memory of GPUs");
  }
  // Lets go of the region, if it is open. An error leaves it open.
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
