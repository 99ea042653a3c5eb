// Streams and the current device of CUDA, for as long as an object lives; waiting for a stream with
// a deadline. Memory is in kernels/cuda/buffer.h.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <thread>

#include "collective/communicator.h"
#include "kernels/cuda/status.h"
#include "kernels/status.h"

namespace tributary::collective {

using cuda::CudaStatus;

// The calling thread's current device, for as long as this lives.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    if (before_ != device) (void)cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~ScopedDevice() {
    if (changed_ && before_ >= 0) (void)cudaSetDevice(before_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int before_ = -1;
  bool changed_ = false;
};

class Stream {
 public:
  Stream() = default;
  ~Stream() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Waits for no other stream.
  Status Create() {
    return CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStream");
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Waits until the stream is done: OK, kDeadlineExceeded or the error of what it ran. Looks all the
// time at first, since a step takes microseconds and waking up takes tens of them; then now and
// then. `give_up` is asked between looks.
template <typename GiveUp>
Status AwaitStream(cudaStream_t stream, Deadline deadline, const GiveUp& give_up) {
  using std::chrono::microseconds;
  const Deadline start = std::chrono::steady_clock::now();
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return Status::Ok();
    if (state != cudaErrorNotReady) return CudaStatus(state, "stream");
    if (Status s = give_up(); !s.ok()) return s;
    const Deadline now = std::chrono::steady_clock::now();
    if (now >= deadline) return {StatusCode::kDeadlineExceeded, "the stream did not finish"};
    if (now - start < microseconds(5000)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(microseconds(50));
    }
  }
}

inline Status AwaitStream(cudaStream_t stream, Deadline deadline) {
  return AwaitStream(stream, deadline, [] { return Status::Ok(); });
}

}  // namespace tributary::collective
