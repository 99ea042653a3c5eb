// What the ranks of a direct exchange tell each other before they map each other's memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/direct/peer_access.h"

namespace tributary::collective {

struct Announcement {
  PeerIdentity who;
  size_t channel_bytes = 0;        // of the layout that the rank uses
  uint64_t address = 0;            // of the rank's memory, in its own process
  cudaIpcMemHandle_t handle = {};  // of the same memory, for other processes
  std::string why_not = "-";       // why this rank cannot take part; "-" when it can

  std::string Encode() const;
  // Returns false when Encode did not write the text.
  bool Decode(const std::string& encoded);
};

bool SameProcess(const PeerIdentity& a, const PeerIdentity& b);

}  // namespace tributary::collective
