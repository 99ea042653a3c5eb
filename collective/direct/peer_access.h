// Whether the GPUs of a group can write each other's memory: how a rank describes itself to its
// peers, and the decision, which is a pure function of the descriptions of all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/status.h"

namespace tributary::collective {

struct PeerIdentity {
  std::string host;           // the same for processes of one running kernel
  std::string pid_namespace;  // process ids mean the same where this is the same
  int64_t pid = 0;
  std::string process;  // unique to a process, whatever its id and namespace
  std::string gpu;      // PCI bus id
};

// Describes this process and GPU `device` of it.
Status DescribeSelf(int device, PeerIdentity* self);

// Why rank `self` cannot reach all of its peers' memory, empty when it can. `reaches(gpu)` says
// whether this process sees the GPU, and its own GPU can write that one's memory: a reason, or
// empty.
template <typename Reaches>
std::string WhyNoDirectAccess(const std::vector<PeerIdentity>& peers, int self, int most_ranks,
                              const Reaches& reaches) {
  const int ranks = static_cast<int>(peers.size());
  if (ranks > most_ranks) {
    return "the group has " + std::to_string(ranks) + " ranks, direct access serves up to " +
           std::to_string(most_ranks);
  }
  for (int r = 0; r < ranks; ++r) {
    if (r == self) continue;
    const std::string rank = "rank " + std::to_string(r);
    if (peers[r].host != peers[self].host) return rank + " is on another host";
    if (peers[r].gpu == peers[self].gpu) continue;
    if (std::string reason = reaches(peers[r].gpu); !reason.empty()) return rank + ": " + reason;
  }
  return "";
}

// What `reaches` of WhyNoDirectAccess says for GPU `device` of this process.
std::string WhyGpuIsOutOfReach(int device, const std::string& peer_gpu);

}  // namespace tributary::collective
