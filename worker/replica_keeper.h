// One rank's part in the replicas of one cache (worker/replica.h): the pages that it keeps for its
// ward, which steps keep up to date, and the transfers that bring pages to where they are missing.
//
// In a cache with replicas every rank keeps the pages of another one as long as the cache exists.
// In others a rank does so only while its neighbour leaves and is replaced (TransferPagesCommand).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"
#include "kernels/key_range.h"
#include "worker/backend.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/parcel_carrier.h"
#include "worker/replica.h"

namespace tributary::worker {

// Used from one thread at a time. After an error of CopyPages or Pass the replica is of no more use
// than the shard after a step that failed: the group needs a new epoch.
class ReplicaKeeper {
 public:
  // Where the memory of a replica comes from.
  struct Memory {
    Backend& backend;
    size_t available = 0;  // bytes
    PageFill fill = PageFill::kZero;
  };

  // `layout`: of the rank itself. It keeps nothing yet.
  ReplicaKeeper(const CacheSpec& spec, DcpLayout layout) : spec_(spec), layout_(layout) {}

  // From now on it keeps the pages of its ward, once they have all their memory. Of a keeper that
  // does already: changes nothing.
  absl::Status Begin(const Memory& memory);
  // Takes memory that the replica does not have yet, until all is there (true) or it is `until`.
  // True if nothing is kept.
  absl::StatusOr<bool> TakeMemory(std::chrono::steady_clock::time_point until);
  // Bytes that the kept pages take.
  size_t bytes() const { return replica_ == nullptr ? 0 : replica_->bytes(); }

  // What a step does to the ward's pages, besides what it does to the rank's own. (The tokens of a
  // step are written by the shard's Run: PlannedStep::replica.)
  absl::Status CopyPages(const std::vector<PageCopy>& copies);

  // INVALID_ARGUMENT with the field. It depends on the command alone, so that all ranks refuse a
  // transfer or none does.
  absl::Status Check(const TransferPagesCommand& transfer) const;
  // Carries out a transfer of pages, of which two ranks have a part. `own`: the rank's shard. An
  // error: the peer may be waiting.
  absl::Status Pass(const TransferPagesCommand& transfer, Shard& own, ParcelCarrier& parcels,
                    collective::Communicator& comm, collective::Deadline deadline);
  // Carries out a transfer without pages: the rank is told that it lacks nothing any more, or
  // begins to keep pages for a hand-over. False: there is more memory to take, and the command is
  // to be repeated. An error: nothing is kept.
  absl::StatusOr<bool> Turn(const TransferPagesCommand& transfer, const Memory& memory,
                            std::chrono::steady_clock::time_point until);

  // The rank whose pages it keeps, once they have all their memory; else -1, and null.
  int ward() const { return complete_ ? WardOf(layout_.rank, stride(), layout_.size) : -1; }
  Shard* kept() const { return complete_ ? replica_.get() : nullptr; }

  // The rank has joined late, and lacks pages until it is told otherwise (HeldCache).
  void JoinedLate();
  bool lacks_pages() const { return lacks_pages_; }
  bool replica_lacks_pages() const { return replica_lacks_pages_; }

 private:
  // Of the cache, or of a hand-over in a cache without replicas.
  int stride() const { return spec_.replica_stride > 0 ? spec_.replica_stride : 1; }
  bool hands_over() const { return spec_.replica_stride == 0; }
  void Stop();

  const CacheSpec spec_;
  const DcpLayout layout_;
  std::unique_ptr<Shard> replica_;  // null: nothing is kept
  bool complete_ = false;           // the replica has all its memory
  bool lacks_pages_ = false;
  bool replica_lacks_pages_ = false;
};

}  // namespace tributary::worker
