// Memory that ranks of one machine share, in which parcels of pages go from one to another.
//
// Between processes a message is copied into the system and out of it by one thread. A parcel in a
// lane is written where its receiver reads it, by as many threads as there are, and a GPU copies
// it from there by itself. What still goes over the communicator is word that it is there, so that
// a peer's end, an abort and a deadline do what they always do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/communicator.h"

namespace tributary::worker {

// Of one rank in one epoch. Used from one thread at a time; every function that takes a
// communicator is called by all its ranks at once.
class ParcelLanes {
 public:
  // The most bytes that a parcel in a lane has.
  static constexpr size_t kParcelBytes = (size_t{64} << 20) + (size_t{1} << 20);

  // Finds out which ranks reach whose memory. An error is the communicator's.
  static absl::StatusOr<std::unique_ptr<ParcelLanes>> Form(collective::Communicator& comm,
                                                           collective::Deadline deadline);
  ~ParcelLanes();
  ParcelLanes(const ParcelLanes&) = delete;
  ParcelLanes& operator=(const ParcelLanes&) = delete;

  // Whether parcels of so many bytes go from the one to the other in a lane; all ranks say alike.
  bool Serves(int from, int to, size_t bytes) const;

  // On the sender: where the next parcel is written. Waits for the receiver of an earlier one.
  absl::StatusOr<std::byte*> Begin(collective::Deadline deadline);
  // Hands over what was begun. The result, on the receiver: the parcel, until Done; null elsewhere.
  absl::StatusOr<std::byte*> Pass(collective::Communicator& comm, int from, int to,
                                  collective::Deadline deadline);
  // On the receiver: has read it. Until then the sender writes there no more.
  void Done();

  // All of the lane of this rank, or of one that it receives from, for those who pin memory.
  // Without data where it is not reached.
  struct Memory {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };
  Memory of(int rank) const;

 private:
  struct Lane;  // a mapping

  explicit ParcelLanes(int size);

  std::vector<bool> reaches_;                 // [from][to]
  std::vector<std::unique_ptr<Lane>> lanes_;  // by rank; null where it is not reached
  int rank_ = 0;
  const int size_;
  uint32_t next_ = 0;             // of the own lane's places
  uint32_t* received_ = nullptr;  // the word of the place that is being read
};

}  // namespace tributary::worker
