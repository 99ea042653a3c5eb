// A cache in host memory, as the reference reads it, and the same cache on the GPU.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/layout/page_layout.h"
#include "kernels/element.h"
#include "kernels/paged_kv.h"

namespace tributary::cuda {

inline bool HasGpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

#define TRIBUTARY_SKIP_WITHOUT_GPU() \
  if (!::tributary::cuda::HasGpu()) GTEST_SKIP() << "no CUDA device on this machine"

// Device memory that frees itself.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(1, count * sizeof(T))), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { Set(host); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void Set(const std::vector<T>& host) {
    ASSERT_LE(host.size(), count_);
    ASSERT_EQ(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  void Fill(int byte) { ASSERT_EQ(cudaMemset(data_, byte, count_ * sizeof(T)), cudaSuccess); }
  std::vector<T> Get() const {
    std::vector<T> host(count_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return host;
  }
  T* data() const { return static_cast<T*>(data_); }
  size_t size() const { return count_; }

 private:
  size_t count_ = 0;
  void* data_ = nullptr;
};

struct CacheShape {
  DType dtype = DType::kFp8E4M3;
  int32_t kv_heads = 2;
  int32_t head_dim = 128;
  int32_t page_size = 16;
  int32_t num_pages = 0;
};

// The reference's layout, every byte NaN until something is written.
class HostCache {
 public:
  explicit HostCache(const CacheShape& shape, bool scaled = false) {
    kv_.num_pages = shape.num_pages;
    kv_.page_size = shape.page_size;
    kv_.geometry = SquareGeometry(shape.kv_heads, shape.head_dim, shape.dtype);
    bytes_.assign(PageBytes(kv_) * shape.num_pages, std::byte{0x7f});
    if (!IsFp8(shape.dtype)) bytes_.assign(bytes_.size(), std::byte{0xff});
    kv_.base = bytes_.data();
    if (scaled) {
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        k_scale_.push_back(0.5f + 0.25f * static_cast<float>(h));
        v_scale_.push_back(1.5f - 0.125f * static_cast<float>(h));
      }
      kv_.k_scale = k_scale_.data();
      kv_.v_scale = v_scale_.data();
    }
  }
  const PagedKv& kv() const { return kv_; }
  const std::vector<float>& k_scale() const { return k_scale_; }
  const std::vector<float>& v_scale() const { return v_scale_; }
  std::vector<std::byte>& bytes() { return bytes_; }

  // Normally distributed keys and values in the first `count` slots of a sequence.
  void Fill(const std::vector<int32_t>& pages, int64_t count, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t slot = 0; slot < count; ++slot) {
      const int32_t page = pages[slot / kv_.page_size];
      for (int32_t head = 0; head < kv_.geometry.kv_heads; ++head) {
        for (int32_t d = 0; d < kv_.geometry.key_dim; ++d) {
          const auto at = static_cast<int32_t>(slot % kv_.page_size);
          StoreElement(kv_.geometry.dtype, KeyRow(kv_, page, head, at), d, normal(random));
          StoreElement(kv_.geometry.dtype, ValueRow(kv_, page, head, at), d, normal(random));
        }
      }
    }
  }

 private:
  PagedKv kv_;
  std::vector<std::byte> bytes_;
  std::vector<float> k_scale_;
  std::vector<float> v_scale_;
};

// Reorders the bytes of a cache between the reference's layout and the GPU's.
enum class Direction { kToGpu, kFromGpu };
inline std::vector<std::byte> Reorder(const PagedKv& kv, const std::vector<std::byte>& from,
                                      Direction direction) {
  std::vector<std::byte> to(from.size());
  const int bytes = static_cast<int>(SizeOf(kv.geometry.dtype));
  const size_t plane_bytes = KeyPlaneBytes(kv.geometry, kv.page_size);
  for (size_t plane = 0; plane < from.size() / plane_bytes; ++plane) {
    const bool values = plane / kv.geometry.kv_heads % 2 == 1;
    for (int token = 0; token < kv.page_size; ++token) {
      for (int d = 0; d < kv.geometry.key_dim; ++d) {
        const size_t host = plane * plane_bytes + (size_t(token) * kv.geometry.key_dim + d) * bytes;
        const size_t gpu = plane * plane_bytes +
                           (values ? ValueOffset : KeyOffset)(token, d, kv.geometry.key_dim, bytes);
        std::memcpy(&to[direction == Direction::kToGpu ? gpu : host],
                    &from[direction == Direction::kToGpu ? host : gpu], bytes);
      }
    }
  }
  return to;
}

}  // namespace tributary::cuda
