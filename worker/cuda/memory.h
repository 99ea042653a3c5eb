// Memory of a rank that grows to the largest step and is then kept: memory of its GPU, and pinned
// host memory, which the GPU copies from and to. The buffers of kernels/cuda/buffer.h free
// themselves; the classes here decide when to take more.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/buffer.h"
#include "worker/cuda/status.h"

namespace tributary::worker {

// A buffer that grows. Where is as in cuda::Buffer.
template <typename Where>
class GrowingBuffer {
 public:
  std::byte* data() const { return buffer_.data(); }
  size_t bytes() const { return buffer_.bytes(); }
  template <typename T>
  T* as() const {
    return buffer_.template as<T>();
  }
  void Free() { buffer_.Free(); }

 protected:
  GrowingBuffer() = default;
  explicit GrowingBuffer(Where where) : buffer_(where) {}

  // The size to grow to for `needed` bytes: half as much again as it has at the least, so that a
  // slowly growing need does not allocate at every step.
  size_t Grown(size_t needed) const {
    constexpr size_t kLeast = 4096;
    return std::max({needed, bytes() + bytes() / 2, kLeast});
  }
  // Gives back what it holds, and takes `bytes`. kResourceExhausted leaves it empty.
  absl::Status Take(size_t bytes) { return FromCuda("taking memory", buffer_.Allocate(bytes)); }

  cuda::Buffer<Where> buffer_;
};

// Where a DeviceMemory lies: on the device that is current when it grows. With a stream, memory is
// taken and given back in the order of that stream.
struct OnDeviceInOrder {
  cudaStream_t stream = nullptr;

  cudaError_t Allocate(void** data, size_t bytes) const {
    return stream == nullptr ? cudaMalloc(data, bytes) : cudaMallocAsync(data, bytes, stream);
  }
  void Free(void* data) const {
    (void)(stream == nullptr ? cudaFree(data) : cudaFreeAsync(data, stream));
  }
};

// Memory of the device that is current when it grows. What it holds is lost when it grows.
//
// With a stream, what was enqueued there before it grew works on the old memory, what is enqueued
// afterwards on the new, and neither taking nor giving back waits for what runs on the GPU. Other
// streams use it only where they are ordered behind that one.
class DeviceMemory : public GrowingBuffer<OnDeviceInOrder> {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(cudaStream_t stream) : GrowingBuffer(OnDeviceInOrder{stream}) {}

  // Makes it at least `bytes` large. kResourceExhausted leaves it empty.
  absl::Status Reserve(size_t bytes);
  // The same; where it grew, all bytes are zero once `stream` has come so far.
  absl::Status ReserveZeroed(size_t bytes, cudaStream_t stream);
};

// Pinned host memory, usable from every device. What it holds is lost when it grows.
//
// Memory that it has outgrown stays until it is destroyed: giving pinned memory back waits for all
// kernels of the device, and with that for the hosts of sessions. It grows by half each time, so
// all of it is less than three times the largest.
class PinnedMemory : public GrowingBuffer<cuda::Pinned> {
 public:
  // Makes it at least `bytes` large. kResourceExhausted leaves it empty.
  absl::Status Reserve(size_t bytes);

 private:
  std::vector<cuda::PinnedBuffer> outgrown_;
};

}  // namespace tributary::worker
