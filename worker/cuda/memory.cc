#include "worker/cuda/memory.h"

#include <algorithm>

#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

constexpr size_t kLeast = 4096;

// Half as much again, so that a slowly growing need does not allocate at every step.
size_t Grown(size_t held, size_t needed) { return std::max({needed, held + held / 2, kLeast}); }

}  // namespace

DeviceMemory::~DeviceMemory() { cudaFree(data_); }

absl::Status DeviceMemory::Reserve(size_t bytes) {
  if (bytes <= bytes_) return absl::OkStatus();
  const size_t grown = Grown(bytes_, bytes);
  cudaFree(data_);  // first, so that the peak is the larger of the two
  data_ = nullptr;
  bytes_ = 0;
  void* data = nullptr;
  TRIBUTARY_CUDA_OK(cudaMalloc(&data, grown));
  data_ = static_cast<std::byte*>(data);
  bytes_ = grown;
  return absl::OkStatus();
}

absl::Status DeviceMemory::ReserveZeroed(size_t bytes, cudaStream_t stream) {
  if (bytes <= bytes_) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(Reserve(bytes));
  TRIBUTARY_CUDA_OK(cudaMemsetAsync(data_, 0, bytes_, stream));
  return absl::OkStatus();
}

PinnedMemory::~PinnedMemory() { cudaFreeHost(data_); }

absl::Status PinnedMemory::Reserve(size_t bytes) {
  if (bytes <= bytes_) return absl::OkStatus();
  const size_t grown = Grown(bytes_, bytes);
  cudaFreeHost(data_);
  data_ = nullptr;
  bytes_ = 0;
  void* data = nullptr;
  TRIBUTARY_CUDA_OK(cudaHostAlloc(&data, grown, cudaHostAllocPortable));
  data_ = static_cast<std::byte*>(data);
  bytes_ = grown;
  return absl::OkStatus();
}

}  // namespace tributary::worker
