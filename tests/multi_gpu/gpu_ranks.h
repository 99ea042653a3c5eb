// Ranks as threads, with a GPU each or on one GPU, and problems for them to exchange.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collective/direct/retired_memory.h"
#include "collective/group/device_group.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/element.h"
#include "kernels/reference.h"
#include "tests/collective/group.h"

namespace tributary::collective {

inline int GpuCount() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

// Skips when the machine has fewer GPUs; says what it has.
#define TRIBUTARY_SKIP_BELOW_GPUS(n)                              \
  if (::tributary::collective::GpuCount() < (n)) {                \
    GTEST_SKIP() << "needs " << (n) << " GPUs, this machine has " \
                 << ::tributary::collective::GpuCount();          \
  }

// Memory of the device that is current at creation.
class GpuBuffer {
 public:
  explicit GpuBuffer(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, bytes == 0 ? 1 : bytes), cudaSuccess);
  }
  ~GpuBuffer() { cudaFree(data_); }
  GpuBuffer(const GpuBuffer&) = delete;
  GpuBuffer& operator=(const GpuBuffer&) = delete;

  void Set(const void* from, cudaStream_t stream) {
    EXPECT_EQ(cudaMemcpyAsync(data_, from, bytes_, cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  // Bytes [begin, begin + bytes) of it.
  void Set(const std::byte* from, cudaStream_t stream, size_t begin, size_t bytes) {
    EXPECT_EQ(cudaMemcpyAsync(static_cast<std::byte*>(data_) + begin, from + begin, bytes,
                              cudaMemcpyHostToDevice, stream),
              cudaSuccess);
  }
  void Get(void* to, cudaStream_t stream) const {
    EXPECT_EQ(cudaMemcpyAsync(to, data_, bytes_, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  }
  void Fill(int byte, cudaStream_t stream) {
    EXPECT_EQ(cudaMemsetAsync(data_, byte, bytes_, stream), cudaSuccess);
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const size_t bytes_;
  void* data_ = nullptr;
};

// Elements of a type, as bytes, and what they are worth.
struct Elements {
  std::vector<std::byte> bytes;
  std::vector<float> values;
};
inline Elements Encode(DType type, const std::vector<float>& values) {
  Elements e{std::vector<std::byte>(values.size() * SizeOf(type)), std::vector<float>()};
  for (size_t i = 0; i < values.size(); ++i) StoreElement(type, e.bytes.data(), i, values[i]);
  for (size_t i = 0; i < values.size(); ++i) {
    e.values.push_back(LoadElement(type, e.bytes.data(), i));
  }
  return e;
}

struct ExchangeCase {
  int32_t rows = 3;
  int32_t heads = 8;
  int32_t value_dim = 128;
  Strategy strategy = Strategy::kDirect;
  Placement placement = Placement::kGathered;
  DType o = DType::kF32;
  DType wire = DType::kBf16;
  DType out = DType::kF32;
  bool sinks = false;

  std::string Describe() const {
    return std::string(Name(strategy)) + " " + Name(placement) + ", " + std::to_string(rows) +
           " rows, " + std::to_string(heads) + " heads of " + std::to_string(value_dim) + ", " +
           Name(o) + " over " + Name(wire) + " to " + Name(out) + (sinks ? ", sinks" : "");
  }
};

// Random partials. A third of them are empty, with NaN in their O; every seventh row has no keys on
// any rank.
struct Partials {
  std::vector<std::vector<float>> o;    // of ranks: [rows, heads, value_dim]
  std::vector<std::vector<float>> lse;  // [rows, heads]
  std::vector<float> sinks;             // [heads]
};

inline Partials RandomPartials(const ExchangeCase& c, int ranks, uint32_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  Partials p;
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> o, lse;
    for (int32_t pair = 0; pair < c.rows * c.heads; ++pair) {
      const bool empty = (pair / c.heads) % 7 == 6 || uniform(random) < 0.33f;
      lse.push_back(empty ? -kInf : 6.0f * normal(random));
      for (int32_t d = 0; d < c.value_dim; ++d) {
        o.push_back(empty ? std::numeric_limits<float>::quiet_NaN() : normal(random));
      }
    }
    p.o.push_back(std::move(o));
    p.lse.push_back(std::move(lse));
  }
  for (int32_t h = 0; h < c.heads; ++h) p.sinks.push_back(h % 5 == 4 ? -kInf : normal(random));
  return p;
}

// One rank: its group and the stream it works on.
struct GpuRank {
  std::unique_ptr<DeviceGroup> group;
  cudaStream_t stream = nullptr;
};

// A group of threads.
class GpuGroup {
 public:
  // `shared_gpu`: all ranks on GPU 0; otherwise rank r has GPU r.
  GpuGroup(int size, bool shared_gpu, DeviceGroupOptions options = {}) : ranks_(size) {
    MemoryRendezvous rendezvous;
    OnEveryRank(size, [&](int r) {
      DeviceGroupOptions own = options;
      own.rank = r;
      own.size = size;
      own.epoch = options.epoch + 1;
      own.device = shared_gpu ? 0 : r;
      ASSERT_EQ(cudaSetDevice(own.device), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&ranks_[r].stream, cudaStreamNonBlocking), cudaSuccess);
      const Status s = CreateDeviceGroup(own, rendezvous, Far(), &ranks_[r].group);
      ASSERT_TRUE(s.ok()) << "rank " << r << ": " << Text(s);
    });
    shared_gpu_ = shared_gpu;
  }
  ~GpuGroup() {
    OnEveryRank(size(), [&](int r) {
      (void)cudaSetDevice(device(r));
      ranks_[r].group.reset();
      if (ranks_[r].stream != nullptr) (void)cudaStreamDestroy(ranks_[r].stream);
    });
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  int device(int rank) const { return shared_gpu_ ? 0 : rank; }
  GpuRank& rank(int r) { return ranks_[r]; }
  bool usable() const {
    for (const GpuRank& r : ranks_) {
      if (r.group == nullptr) return false;
    }
    return true;
  }

 private:
  std::vector<GpuRank> ranks_;
  bool shared_gpu_ = false;
};

}  // namespace tributary::collective
