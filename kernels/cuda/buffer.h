// Memory from CUDA that frees itself: of a GPU, and of the host where GPUs can reach it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace tributary::cuda {

// Memory of the device that is current when it is allocated.
struct OnDevice {
  static cudaError_t Allocate(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
  static void Free(void* data) { (void)cudaFree(data); }
};

// Pinned host memory, which every GPU of the process can read and write.
struct Pinned {
  static cudaError_t Allocate(void** data, size_t bytes) {
    return cudaHostAlloc(data, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  }
  static void Free(void* data) { (void)cudaFreeHost(data); }
};

// The owner of one allocation. Where says which kind of memory it is, and takes and frees it:
// OnDevice, Pinned, or the like of them with state of its own.
template <typename Where>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Where where) : where_(where) {}
  ~Buffer() { Free(); }
  Buffer(Buffer&& o) noexcept
      : where_(o.where_),
        data_(std::exchange(o.data_, nullptr)),
        bytes_(std::exchange(o.bytes_, 0)) {}
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(where_, o.where_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }

  // Frees what it holds first, so that the old and the new memory never exist together. An error
  // leaves it empty. No bytes are taken as one byte: data() is then not null either.
  cudaError_t Allocate(size_t bytes) {
    Free();
    const cudaError_t error = where_.Allocate(&data_, bytes == 0 ? 1 : bytes);
    if (error == cudaSuccess) {
      bytes_ = bytes;
    } else {
      data_ = nullptr;
    }
    return error;
  }
  void Free() {
    if (data_ != nullptr) where_.Free(data_);
    Leak();
  }
  // The memory now belongs to nobody, and stays until the process ends.
  void Leak() {
    data_ = nullptr;
    bytes_ = 0;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Where where_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

using DeviceBuffer = Buffer<OnDevice>;
using PinnedBuffer = Buffer<Pinned>;

}  // namespace tributary::cuda
