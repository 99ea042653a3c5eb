// A process's place in a group of ranks.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/status.h"

namespace tributary::collective {

struct GroupPlace {
  int rank = 0;
  int size = 1;
  uint64_t epoch = 0;
  // The address peers reach us at: a host name or IP; empty means the host name's address.
  std::string host = "127.0.0.1";
};

// kInvalidArgument unless the size is positive and the rank is one of the group.
inline Status CheckPlace(const GroupPlace& place) {
  if (place.size < 1) return InvalidArgument("size is below 1: " + std::to_string(place.size));
  if (place.rank >= 0 && place.rank < place.size) return Status::Ok();
  return InvalidArgument("rank " + std::to_string(place.rank) + " is not in a group of " +
                         std::to_string(place.size));
}

}  // namespace tributary::collective
