// One rank's part in moving tokens from a cache to one that is dealt over another number of ranks
// (MoveTokensCommand).
#pragma once

#include "absl/status/status.h"
#include "collective/communicator.h"
#include "worker/backend.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/parcel_carrier.h"

namespace tributary::worker {

// What a rank has of both caches; null where it has nothing.
struct MoveEnds {
  Shard* from = nullptr;
  const CacheSpec* from_spec = nullptr;
  Shard* to = nullptr;  // or what it keeps for another rank, as the command says
  const CacheSpec* to_spec = nullptr;
};

// All ranks of `comm` call this with the same command. An error: peers may be waiting. Every run
// travels with a checksum.
absl::Status MoveTokens(const MoveTokensCommand& move, const MoveEnds& ends, ParcelCarrier& parcels,
                        collective::Communicator& comm, collective::Deadline deadline);

}  // namespace tributary::worker
