// What a group of ranks can do together on host memory. There are three implementations: ranks as
// threads of one process (in_process.h), and ranks as processes over TCP (gloo/gloo.h) or over TCP
// under TLS (tls/tls.h). Collectives on memory of GPUs have an interface of their own
// (device/device_communicator.h).
//
// Every operation takes a deadline, and all ranks enter the same operations in the same order. An
// operation that returns an error leaves the communicator broken: every later operation fails at
// once with the first error, and the group must be formed again under a new epoch. Abort() may be
// called from any thread; it unblocks a rank that waits, and breaks the communicator. All other
// functions are called from one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/status.h"

namespace tributary::collective {

using Deadline = std::chrono::steady_clock::time_point;

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The generation of the group; messages of another epoch are never mixed in.
  virtual uint64_t epoch() const = 0;

  // `bytes` is what one rank sends. recv: [size][bytes], in rank order.
  virtual Status AllGather(const void* send, void* recv, size_t bytes, Deadline deadline) = 0;
  // send: [size][bytes] (part i goes to rank i); recv: [size][bytes] (part i came from rank i).
  virtual Status AllToAll(const void* send, void* recv, size_t bytes, Deadline deadline) = 0;
  // send: [size][count]; recv: [count], the sum over ranks of part rank(), added in rank order.
  virtual Status ReduceScatter(const float* send, float* recv, size_t count, Deadline deadline) = 0;
  // recv: [size][bytes] on rank `root`, ignored elsewhere.
  virtual Status Gather(const void* send, void* recv, size_t bytes, int root,
                        Deadline deadline) = 0;
  // Rank `to` gets what another rank, `from`, sends. The other ranks call it as well, with any
  // pointers, and may leave at once. recv: [bytes] on `to`, ignored elsewhere.
  virtual Status Pass(const void* send, void* recv, size_t bytes, int from, int to,
                      Deadline deadline) = 0;
  // Returns when all ranks have entered it.
  virtual Status Barrier(Deadline deadline) = 0;

  virtual void Abort(const std::string& reason) = 0;
};

}  // namespace tributary::collective
