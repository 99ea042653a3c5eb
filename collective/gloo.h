// Ranks as processes, over Gloo's TCP transport.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "collective/communicator.h"
#include "collective/rendezvous.h"

namespace tributary::collective {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  uint64_t epoch = 0;
  // The address peers reach us at: a host name or IP; empty means the host name's address.
  std::string host = "127.0.0.1";
};

// Connects to every peer; returns when all ranks did or the deadline passed. Keys put into the
// rendezvous carry the epoch, so a store may serve many generations.
Status CreateGlooCommunicator(const GlooOptions& options, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<Communicator>* out);

}  // namespace tributary::collective
