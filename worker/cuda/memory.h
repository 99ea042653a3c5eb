// Memory of a rank that grows to the largest step and is then kept: memory of its GPU, and pinned
// host memory, which the GPU copies from and to. The buffers of kernels/cuda/buffer.h free
// themselves; the classes here decide when to take more.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/buffer.h"

namespace tributary::worker {

// Memory of the device that is current when it grows. What it holds is lost when it grows.
//
// With a stream, it is taken and given back in the order of that stream: what was enqueued
// before works on the old memory, what is enqueued afterwards on the new, and neither taking nor
// giving back waits for what runs on the GPU. Other streams use it only where they are ordered
// behind that one.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(cudaStream_t stream) : stream_(stream) {}
  ~DeviceMemory() { Free(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Makes it at least `bytes` large. kResourceExhausted leaves it empty.
  absl::Status Reserve(size_t bytes);
  // The same; where it grew, all bytes are zero once `stream` has come so far.
  absl::Status ReserveZeroed(size_t bytes, cudaStream_t stream);
  void Free();

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  cudaStream_t stream_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Pinned host memory, usable from every device.
//
// What it has outgrown stays until it is destroyed: giving pinned memory back waits for all kernels
// of the device, and with that for the hosts of sessions. It grows by half each time, so all of it
// is less than three times the largest.
class PinnedMemory {
 public:
  // Makes it at least `bytes` large. kResourceExhausted leaves it empty.
  absl::Status Reserve(size_t bytes);

  std::byte* data() const { return buffer_.data(); }
  size_t bytes() const { return buffer_.bytes(); }
  template <typename T>
  T* as() const {
    return buffer_.as<T>();
  }

 private:
  cuda::PinnedBuffer buffer_;
  std::vector<cuda::PinnedBuffer> outgrown_;
};

}  // namespace tributary::worker
