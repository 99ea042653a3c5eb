// Work that CUDA does for the current device, done for one that is named.
#pragma once

#include <cuda_runtime.h>

namespace tributary::cuda {

// The two functions of CUDA that OnDevice needs; a test gives it others.
struct CurrentDevice {
  static cudaError_t Get(int* device) { return cudaGetDevice(device); }
  static cudaError_t Set(int device) { return cudaSetDevice(device); }
};

// Calls work() while `device` is the calling thread's current device, and makes the device of
// before current again. Returns the first error of these steps; when the device cannot be made
// current, work() is not called.
template <typename Current = CurrentDevice, typename Work>
cudaError_t OnDevice(int device, Work work) {
  int before = 0;
  cudaError_t error = Current::Get(&before);
  if (error != cudaSuccess) return error;
  if (before == device) return work();
  error = Current::Set(device);
  if (error != cudaSuccess) return error;
  error = work();
  const cudaError_t restored = Current::Set(before);
  return error != cudaSuccess ? error : restored;
}

}  // namespace tributary::cuda
