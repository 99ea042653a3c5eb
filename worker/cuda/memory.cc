#include "worker/cuda/memory.h"

#include <algorithm>
#include <utility>

#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

constexpr size_t kLeast = 4096;

// Half as much again, so that a slowly growing need does not allocate at every step.
size_t Grown(size_t held, size_t needed) { return std::max({needed, held + held / 2, kLeast}); }

}  // namespace

void DeviceMemory::Free() {
  if (data_ == nullptr) return;
  static_cast<void>(stream_ == nullptr ? cudaFree(data_) : cudaFreeAsync(data_, stream_));
  data_ = nullptr;
  bytes_ = 0;
}

absl::Status DeviceMemory::Reserve(size_t bytes) {
  if (bytes <= bytes_) return absl::OkStatus();
  const size_t grown = Grown(bytes_, bytes);
  Free();  // first, so that the old and the new memory never exist together
  TRIBUTARY_RETURN_IF_ERROR(
      FromCuda("taking memory", stream_ == nullptr ? cudaMalloc(&data_, grown)
                                                   : cudaMallocAsync(&data_, grown, stream_)));
  bytes_ = grown;
  return absl::OkStatus();
}

absl::Status DeviceMemory::ReserveZeroed(size_t bytes, cudaStream_t stream) {
  if (bytes <= bytes_) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(Reserve(bytes));
  TRIBUTARY_CUDA_OK(cudaMemsetAsync(data_, 0, bytes_, stream));
  return absl::OkStatus();
}

absl::Status PinnedMemory::Reserve(size_t bytes) {
  if (bytes <= buffer_.bytes()) return absl::OkStatus();
  const size_t grown = Grown(buffer_.bytes(), bytes);
  if (buffer_.bytes() > 0) outgrown_.push_back(std::move(buffer_));
  buffer_ = cuda::PinnedBuffer();
  return FromCuda("taking memory", buffer_.Allocate(grown));
}

}  // namespace tributary::worker
