// A cache in host memory, as the reference reads it, and the same cache on the GPU.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/cuda/layout/page_layout.h"
#include "kernels/element.h"
#include "kernels/head_dims.h"
#include "kernels/nvfp4.h"
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

// The rows of the table of head dims that a family of kernels is built for, as
// DimsOf(&HeadDims::decode_sm80).
inline std::vector<HeadDims> DimsOf(bool HeadDims::*family) {
  std::vector<HeadDims> rows;
  for (const HeadDims& row : kHeadDims) {
    if (row.*family) rows.push_back(row);
  }
  return rows;
}

// "d128", or "d192_128" where values have fewer dimensions than keys.
inline std::string NameOf(const HeadDims& dims) {
  return "d" + std::to_string(dims.key_dim) +
         (dims.key_dim == dims.value_dim ? "" : "_" + std::to_string(dims.value_dim));
}

inline KvGeometry GeometryOf(int32_t kv_heads, const HeadDims& dims, DType dtype) {
  return {
      .kv_heads = kv_heads, .key_dim = dims.key_dim, .value_dim = dims.value_dim, .dtype = dtype};
}

struct CacheShape {
  KvGeometry geometry = SquareGeometry(/*kv_heads=*/2, /*head_dim=*/128, DType::kFp8E4M3);
  int32_t page_size = 16;
  int32_t num_pages = 0;
};

// The reference's layout, every byte NaN until something is written.
class HostCache {
 public:
  explicit HostCache(const CacheShape& shape, bool scaled = false) {
    kv_.num_pages = shape.num_pages;
    kv_.page_size = shape.page_size;
    kv_.geometry = shape.geometry;
    bytes_.assign(PageBytes(kv_) * shape.num_pages, std::byte{0x7f});
    if (!IsFp8(shape.geometry.dtype)) bytes_.assign(bytes_.size(), std::byte{0xff});
    kv_.base = bytes_.data();
    if (scaled) {
      for (int32_t h = 0; h < shape.geometry.kv_heads; ++h) {
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
    const KvGeometry& g = kv_.geometry;
    std::normal_distribution<float> normal;
    for (int64_t slot = 0; slot < count; ++slot) {
      const int32_t page = pages[slot / kv_.page_size];
      const auto at = static_cast<int32_t>(slot % kv_.page_size);
      for (int32_t head = 0; head < g.kv_heads; ++head) {
        Store(KeyRow(kv_, page, head, at), KeyScales(kv_, page, head, at), g.key_dim,
              [&] { return normal(random); });
        Store(ValueRow(kv_, page, head, at), ValueScales(kv_, page, head, at), g.value_dim,
              [&] { return normal(random); });
      }
      ClearKeyPadding(page, at);
    }
  }

  // Makes all elements of a key the same, or about the same where blocks have scales.
  void FillKey(int32_t page, int32_t head, int32_t slot, float value) {
    Store(KeyRow(kv_, page, head, slot), KeyScales(kv_, page, head, slot), kv_.geometry.key_dim,
          [value] { return value; });
  }

  // Makes element d of a key (value) what is not finite, if its type has that: of NVFP4 the block's
  // scale is NaN.
  void PoisonKey(int32_t page, int32_t head, int32_t slot, size_t d, float value) {
    Poison(KeyRow(kv_, page, head, slot), KeyScales(kv_, page, head, slot), d, value);
  }
  void PoisonValue(int32_t page, int32_t head, int32_t slot, size_t d, float value) {
    Poison(ValueRow(kv_, page, head, slot), ValueScales(kv_, page, head, slot), d, value);
  }

  // Makes what lies behind a slot's keys zero, as an append on the GPU does.
  void ClearKeyPadding(int32_t page, int32_t slot) {
    const KvGeometry& g = kv_.geometry;
    for (int32_t head = 0; head < g.kv_heads; ++head) {
      std::memset(KeyRow(kv_, page, head, slot) + KeyBytes(g), 0, KeyRowBytes(g) - KeyBytes(g));
    }
  }

 private:
  // Stores `dims` numbers of number(), quantised with a tensor scale of 1.
  template <typename Number>
  void Store(std::byte* row, std::byte* scales, int32_t dims, Number number) {
    const DType type = kv_.geometry.dtype;
    for (int32_t d = 0; d < dims; d += kNvfp4Block) {
      std::array<float, kNvfp4Block> block;
      for (float& x : block) x = number();
      float divisor = 1.0f;
      if (type == DType::kNvfp4) {
        uint32_t largest = 0;
        for (const float x : block) largest = std::max(largest, MagnitudeBits(x));
        const uint8_t scale = Nvfp4BlockScale(largest, 1.0f);
        scales[d / kNvfp4Block] = std::byte{scale};
        divisor = Nvfp4Divisor(scale, 1.0f);
      }
      for (int32_t i = 0; i < kNvfp4Block; ++i) StoreElement(type, row, d + i, block[i] / divisor);
    }
  }
  void Poison(std::byte* row, std::byte* scales, size_t d, float value) {
    if (kv_.geometry.dtype == DType::kNvfp4) {
      scales[d / kNvfp4Block] = std::byte{Float8E4M3Format::kNan};
    } else {
      StoreElement(kv_.geometry.dtype, row, d, value);
    }
  }

  PagedKv kv_;
  std::vector<std::byte> bytes_;
  std::vector<float> k_scale_;
  std::vector<float> v_scale_;
};

enum class Direction { kToGpu, kFromGpu };

// Reorders one head's codes and block scales of a slot, whose begins in the reference's layout
// these are; `plane` is that of the head's keys (values), in both.
template <typename PlaceOf, typename ScaleOf>
void ReorderNvfp4(const std::vector<std::byte>& from, Direction direction, size_t plane,
                  size_t codes, size_t scales, int32_t dims, PlaceOf place_of, ScaleOf scale_of,
                  std::vector<std::byte>* to) {
  const bool to_gpu = direction == Direction::kToGpu;
  for (int32_t d = 0; d < dims; ++d) {
    const CodePlace place = place_of(d);
    std::byte& byte = (*to)[to_gpu ? plane + place.byte : codes + size_t(d) / 2];
    const auto held =
        static_cast<uint32_t>(from[to_gpu ? codes + size_t(d) / 2 : plane + place.byte]);
    byte |= static_cast<std::byte>(to_gpu ? PlacedCode(held >> d % 2 * 4 & 0xfu, place.high)
                                          : CodeOfByte(held, place.high) << d % 2 * 4);
    if (d % kNvfp4Block != 0) continue;
    const size_t host = scales + static_cast<size_t>(d / kNvfp4Block);
    const size_t gpu = plane + scale_of(d);
    (*to)[to_gpu ? gpu : host] = from[to_gpu ? host : gpu];
  }
}

// The same of a whole cache of NVFP4.
inline std::vector<std::byte> ReorderNvfp4(const PagedKv& kv, const std::vector<std::byte>& from,
                                           Direction direction) {
  std::vector<std::byte> to(from.size());
  const KvGeometry& g = kv.geometry;
  const auto begin_of = [&](const std::byte* at) { return static_cast<size_t>(at - kv.base); };
  for (int32_t page = 0; page < kv.num_pages; ++page) {
    for (int32_t head = 0; head < g.kv_heads; ++head) {
      for (int32_t slot = 0; slot < kv.page_size; ++slot) {
        ReorderNvfp4(
            from, direction, begin_of(KeyPlane(kv, page, head)),
            begin_of(KeyRow(kv, page, head, slot)), begin_of(KeyScales(kv, page, head, slot)),
            g.key_dim, [&](int32_t d) { return Nvfp4KeyPlace(slot, d, g.key_dim); },
            [&](int32_t d) { return Nvfp4KeyScale(slot, d, g.key_dim); }, &to);
        ReorderNvfp4(
            from, direction, begin_of(ValuePlane(kv, page, head)),
            begin_of(ValueRow(kv, page, head, slot)), begin_of(ValueScales(kv, page, head, slot)),
            g.value_dim, [&](int32_t d) { return Nvfp4ValuePlace(slot, d, g.value_dim); },
            [&](int32_t d) { return Nvfp4ValueScale(slot, d, g.value_dim); }, &to);
      }
    }
  }
  return to;
}

// Reorders the bytes of a cache, the padding of keys included, between the reference's layout and
// the GPU's.
inline std::vector<std::byte> Reorder(const PagedKv& kv, const std::vector<std::byte>& from,
                                      Direction direction) {
  if (kv.geometry.dtype == DType::kNvfp4) return ReorderNvfp4(kv, from, direction);
  std::vector<std::byte> to(from.size());
  const KvGeometry& g = kv.geometry;
  const int bytes = static_cast<int>(SizeOf(g.dtype));
  const auto move = [&](size_t host, size_t gpu) {
    if (direction == Direction::kFromGpu) std::swap(host, gpu);
    std::memcpy(&to[gpu], &from[host], bytes);
  };
  for (int32_t page = 0; page < kv.num_pages; ++page) {
    for (int32_t head = 0; head < g.kv_heads; ++head) {
      const size_t begin = size_t(page) * PageBytes(kv);
      const size_t keys = begin + KeyPlaneOffset(g, kv.page_size, head);
      const size_t values = begin + ValuePlaneOffset(g, kv.page_size, head);
      for (int32_t slot = 0; slot < kv.page_size; ++slot) {
        for (int32_t d = 0; d < static_cast<int32_t>(KeyRowBytes(g)) / bytes; ++d) {
          move(keys + slot * KeyRowBytes(g) + size_t(d) * bytes,
               keys + KeyOffset(slot, d, g.key_dim, bytes));
        }
        for (int32_t d = 0; d < g.value_dim; ++d) {
          move(values + slot * ValueBytes(g) + size_t(d) * bytes,
               values + ValueOffset(slot, d, g.value_dim, bytes));
        }
      }
    }
  }
  return to;
}

}  // namespace tributary::cuda
