// One rank's part in moving tokens from a cache to one that is dealt over another number of ranks
// (MoveTokensCommand).
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "collective/communicator.h"
#include "worker/backend.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/step_run.h"

namespace tributary::worker {

// Used from one thread at a time.
class TokenMover {
 public:
  // What the rank has of both caches; null where it has nothing.
  struct Ends {
    Shard* from = nullptr;
    const CacheSpec* from_spec = nullptr;
    Shard* to = nullptr;  // or what it keeps for another rank, as the command says
    const CacheSpec* to_spec = nullptr;
  };

  // All ranks of `comm` call this with the same command. An error: peers may be waiting. Every run
  // travels with a checksum.
  absl::Status Move(const MoveTokensCommand& move, const Ends& ends, collective::Communicator& comm,
                    collective::Deadline deadline);

 private:
  absl::Status Check(const MoveTokensCommand& move, const Ends& ends, int size) const;

  Scratch<std::byte> parcel_;
};

}  // namespace tributary::worker
