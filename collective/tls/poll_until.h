// Waiting for sockets. Internal to this room.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "collective/communicator.h"

namespace tributary::collective {

// Returns when something that is waited for has happened, or at the deadline, or for no reason.
inline void PollUntil(std::vector<pollfd>& waits, Deadline deadline) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(1);
  const Deadline now = std::chrono::steady_clock::now();
  std::chrono::milliseconds timeout{0};
  if (deadline > now + kLongest) {
    timeout = kLongest;
  } else if (deadline > now) {
    timeout = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
  }
  poll(waits.data(), waits.size(), static_cast<int>(timeout.count()));
}

}  // namespace tributary::collective
