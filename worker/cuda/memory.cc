#include "worker/cuda/memory.h"

#include <utility>

namespace tributary::worker {

absl::Status DeviceMemory::Reserve(size_t bytes) {
  if (bytes <= this->bytes()) return absl::OkStatus();
  return Take(Grown(bytes));
}

absl::Status DeviceMemory::ReserveZeroed(size_t bytes, cudaStream_t stream) {
  if (bytes <= this->bytes()) return absl::OkStatus();
  TRIBUTARY_RETURN_IF_ERROR(Reserve(bytes));
  TRIBUTARY_CUDA_OK(cudaMemsetAsync(data(), 0, this->bytes(), stream));
  return absl::OkStatus();
}

absl::Status PinnedMemory::Reserve(size_t bytes) {
  if (bytes <= this->bytes()) return absl::OkStatus();
  const size_t grown = Grown(bytes);
  if (this->bytes() > 0) outgrown_.push_back(std::move(buffer_));
  return Take(grown);
}

}  // namespace tributary::worker
