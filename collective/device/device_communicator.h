// What the GPUs of a group can do together, in the order of a CUDA stream. The sibling of
// Communicator, which works on host memory.
//
// Every operation is entered by all ranks in the same order and only enqueues: buffers are device
// memory of this rank's GPU and stay untouched until the stream has passed the operation. Nothing
// is allocated and nothing is waited for, so operations can be captured in a CUDA graph, after each
// kind has run once outside of one (the first use of a connection sets it up).
//
// Await is where time passes and errors show. An operation, or a wait, that returns an error leaves
// the communicator broken: everything later fails at once with the first error, and the group must
// be formed again under a new epoch. Abort() may be called from any thread; it makes what is
// enqueued end soon, with meaningless results, and leaves the GPU usable.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/communicator.h"
#include "kernels/dtype.h"
#include "kernels/status.h"

namespace tributary::collective {

class DeviceCommunicator {
 public:
  virtual ~DeviceCommunicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual uint64_t epoch() const = 0;

  // recv: [size][bytes], in rank order.
  virtual Status AllGather(const void* send, void* recv, size_t bytes, cudaStream_t stream) = 0;
  // send: [size][bytes] (part i goes to rank i); recv: [size][bytes] (part i came from rank i).
  virtual Status AllToAll(const void* send, void* recv, size_t bytes, cudaStream_t stream) = 0;
  // send: [size][count] of `type` (f32, bf16 or f16); recv: [count], the sum over ranks of part
  // rank(), in an order that the transport chooses and rounded to `type` between additions.
  virtual Status ReduceScatter(const void* send, void* recv, size_t count, DType type,
                               cudaStream_t stream) = 0;
  // recv: [size][bytes] on root, ignored elsewhere.
  virtual Status Gather(const void* send, void* recv, size_t bytes, int root,
                        cudaStream_t stream) = 0;
  // buffer: [bytes], read on root, written elsewhere.
  virtual Status Broadcast(void* buffer, size_t bytes, int root, cudaStream_t stream) = 0;

  // Waits until the stream has done what was enqueued before the call. kDeadlineExceeded aborts.
  virtual Status Await(cudaStream_t stream, Deadline deadline) = 0;
  // The first error, without waiting: of a call, or one that was noticed since.
  virtual Status Health() = 0;
  virtual void Abort(const std::string& reason) = 0;
};

}  // namespace tributary::collective
