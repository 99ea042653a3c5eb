// How parcels of pages, or of runs of tokens, get from one rank to another.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "collective/communicator.h"
#include "worker/backend.h"
#include "worker/parcel_lanes.h"
#include "worker/step_run.h"

namespace tributary::worker {

// Of one rank. Used from one thread at a time.
class ParcelCarrier {
 public:
  // Parcels of fewer bytes than `least_lane_bytes` go over the communicator always.
  ParcelCarrier(Backend& backend, size_t least_lane_bytes)
      : backend_(backend), least_lane_bytes_(least_lane_bytes) {}

  struct Trip {
    int from = 0;
    int to = 0;
    size_t bytes = 0;
  };
  // All ranks call this at once with the same trip. `pack` writes the parcel, on the rank that it
  // comes from; `unpack` reads it, on the rank that it goes to. An error: peers may be waiting.
  absl::Status Carry(const Trip& trip, collective::Communicator& comm,
                     collective::Deadline deadline,
                     const std::function<absl::Status(std::byte*)>& pack,
                     const std::function<absl::Status(const std::byte*)>& unpack);

  // Whether there may be lanes: the ranks of a group say alike, before its first trip.
  void set_lanes(bool may) { may_have_lanes_ = may; }
  // Gives back what it holds. All ranks of a group do so at the same command, and when they leave.
  void Reset();

  // Calls body(part) for every part in [0, parts), on several threads.
  void Spread(int parts, const std::function<void(int part)>& body) const {
    backend_.Spread(parts, body);
  }

 private:
  // Lets the device reach a lane.
  void Pin(int rank);

  Backend& backend_;
  const size_t least_lane_bytes_;
  bool may_have_lanes_ = true;
  std::unique_ptr<ParcelLanes> lanes_;             // null: not formed yet
  std::vector<std::shared_ptr<const void>> pins_;  // by rank; after the lanes
  std::vector<bool> pinned_;
  Scratch<std::byte> buffer_;
};

}  // namespace tributary::worker
