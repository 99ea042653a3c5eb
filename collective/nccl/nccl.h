// GPUs of any number of hosts, over NCCL.
//
// The communicator is created without blocking: when a rank never comes, the caller gets an error
// at its deadline instead of a thread that hangs. Each communicator has a thread that looks for
// errors that NCCL meets between calls (a broken connection, a GPU that failed). NCCL does not
// notice a peer that merely stops; the deadline of Await does, and aborts.
//
// NCCL is loaded when the first communicator is created (libnccl.so.2): one build serves machines
// with and without it. NVLink multicast is not used.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "collective/device/device_communicator.h"
#include "collective/rendezvous/rendezvous.h"
#include "kernels/status.h"

namespace tributary::collective {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  uint64_t epoch = 0;  // used once: after a failure the next attempt takes a new one
  int device = 0;
  std::chrono::milliseconds watch_interval{50};
};

// Empty, or why there is no NCCL: this build was made without, or the library is not installed.
std::string WhyNoNccl();

// All ranks call it; each has a GPU of its own. Returns when all have come or the deadline has
// passed. kFailedPrecondition: there is no NCCL, with the reason of WhyNoNccl.
Status CreateNcclCommunicator(const NcclOptions& options, Rendezvous& rendezvous, Deadline deadline,
                              std::unique_ptr<DeviceCommunicator>* out);

}  // namespace tributary::collective
