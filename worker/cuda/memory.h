// Memory that grows to the largest step and is kept: of the device, and of the host where the
// device can copy from and to it without a stop.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "absl/status/status.h"

namespace tributary::worker {

// Of the current device. What it holds is lost when it grows.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // At least `bytes`. kResourceExhausted leaves it empty.
  absl::Status Reserve(size_t bytes);
  // The same, and all bytes are zero once `stream` has come so far, when it grew.
  absl::Status ReserveZeroed(size_t bytes, cudaStream_t stream);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Pinned host memory, usable from every device.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  absl::Status Reserve(size_t bytes);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tributary::worker
