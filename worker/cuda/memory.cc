#include "worker/cuda/memory.h"

#include <algorithm>

#include "worker/cuda/status.h"

namespace tributary::worker {
namespace {

constexpr size_t kLeast = 4096;

// Half as much again, so that a slowly growing need does not allocate at every step.
size_t Grown(size_t held, size_t needed) { return std::max({needed, held + held / 2, kLeast}); }

template <typename Buffer>
absl::Status Grow(Buffer& buffer, size_t bytes) {
  if (bytes <= buffer.bytes()) return absl::OkStatus();
  return FromCuda("taking memory", buffer.Allocate(Grown(buffer.bytes(), bytes)));
}

}  // namespace

absl::Status DeviceMemory::Reserve(size_t bytes) { return Grow(buffer_, bytes); }

absl::Status DeviceMemory::ReserveZeroed(size_t bytes, cudaStream_t stream) {
  if (bytes <= buffer_.bytes()) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(Reserve(bytes));
  TRIBUTARY_CUDA_OK(cudaMemsetAsync(buffer_.data(), 0, buffer_.bytes(), stream));
  return absl::OkStatus();
}

absl::Status PinnedMemory::Reserve(size_t bytes) { return Grow(buffer_, bytes); }

}  // namespace tributary::worker
