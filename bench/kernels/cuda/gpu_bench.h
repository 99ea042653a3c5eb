// What the GPU benchmarks share: memory, random elements, medians of graph replays.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/layout/nvfp4_layout.h"
#include "kernels/dtype.h"
#include "kernels/float8.h"
#include "kernels/half.h"
#include "kernels/status.h"

namespace tributary::cuda {

// A benchmark that cannot go on says why and ends.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// Device memory that frees itself.
template <typename T>
class GpuArray {
 public:
  GpuArray() = default;
  explicit GpuArray(size_t count) : count_(count) {
    Check(cudaMalloc(&data_, std::max<size_t>(1, count * sizeof(T))), "cudaMalloc");
  }
  explicit GpuArray(const std::vector<T>& host) : GpuArray(host.size()) {
    Check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  }
  ~GpuArray() { cudaFree(data_); }
  GpuArray(GpuArray&& other) noexcept
      : count_(std::exchange(other.count_, 0)), data_(std::exchange(other.data_, nullptr)) {}
  GpuArray& operator=(GpuArray&& other) noexcept {
    std::swap(count_, other.count_);
    std::swap(data_, other.data_);
    return *this;
  }

  T* data() const { return static_cast<T*>(data_); }
  size_t size() const { return count_; }
  T At(size_t index) const {
    T value{};
    Check(cudaMemcpy(&value, data() + index, sizeof(T), cudaMemcpyDeviceToHost), "download");
    return value;
  }
  void Poison() { Check(cudaMemset(data_, 0xff, count_ * sizeof(T)), "cudaMemset"); }

 private:
  size_t count_ = 0;
  void* data_ = nullptr;
};

inline __device__ uint32_t Hash(uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7fb5d329728ea185ull;
  x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44dull;
  return static_cast<uint32_t>(x >> 32);
}

// Random finite elements between 2^-4 and 2 in size, of either sign.
static __global__ void FillRandomWords(uint32_t* words, size_t count, DType type, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    const uint32_t random = Hash(i + (seed << 40));
    uint32_t word = 0;
    if (type == DType::kFp8E4M3) {
      word = (random & 0x9f9f9f9fu) + 0x18181818u;  // exponents 3..6 of bias 7
    } else if (type == DType::kFp8E5M2) {
      word = (random & 0x8f8f8f8fu) + 0x2c2c2c2cu;  // 11..14 of bias 15
    } else if (type == DType::kBf16) {
      word = (random & 0x81ff81ffu) + 0x3d803d80u;
    } else {
      word = (random & 0x8fff8fffu) + 0x2c002c00u;
    }
    words[i] = word;
  }
}
inline void FillRandom(const GpuArray<std::byte>& to, DType type, uint64_t seed) {
  FillRandomWords<<<2048, 256>>>(reinterpret_cast<uint32_t*>(to.data()), to.size() / 4, type, seed);
  Check(cudaDeviceSynchronize(), "fill");
}

// The same of pages of NVFP4 whose keys and values have `dims` dimensions alike: any codes, and
// scales of exponents 3 to 6 of bias 7.
static __global__ void FillRandomStrips(uint32_t* words, size_t count, int dims, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    const uint32_t random = Hash(i + (seed << 40));
    const bool scales = static_cast<int>(i * 4 % Nvfp4StripBytes(dims)) >= Nvfp4ElementBytes(dims);
    words[i] = scales ? (random & 0x1f1f1f1fu) + 0x18181818u : random;
  }
}

inline __device__ double ElementAt(DType type, const void* data, size_t index) {
  const uint8_t byte = static_cast<const uint8_t*>(data)[IsFp8(type) ? index : 0];
  const uint16_t half = IsFp8(type) ? 0 : static_cast<const uint16_t*>(data)[index];
  switch (type) {
    case DType::kBf16:
      return FloatFromBf16(half);
    case DType::kF16:
      return FloatFromF16(half);
    case DType::kFp8E4M3:
      return FloatFromFloat8E4M3(byte);
    case DType::kFp8E5M2:
      return FloatFromFloat8E5M2(byte);
    case DType::kF32:
    case DType::kNvfp4:
      break;
  }
  return static_cast<const float*>(data)[index];
}

// Captures `calls` calls of call(i) in a graph and gives the median time of one, in microseconds.
class GraphTimer {
 public:
  GraphTimer() {
    Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    Check(cudaEventCreate(&begin_), "cudaEventCreate");
    Check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  cudaStream_t stream() const { return stream_; }

  template <typename F>
  double MicrosecondsOf(int calls, F call) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < calls; ++i) call(i);
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    std::vector<double> times;
    for (int i = 0; i < kReplays + 2; ++i) {
      Check(cudaEventRecord(begin_, stream_), "event");
      Check(cudaGraphLaunch(exec, stream_), "replay");
      Check(cudaEventRecord(end_, stream_), "event");
      Check(cudaEventSynchronize(end_), "run");
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin_, end_), "event");
      if (i >= 2) times.push_back(ms * 1e3 / calls);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
  }

 private:
  static constexpr int kReplays = 9;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// {<head>"cases": [...]} in a file, a line a case; without a path nothing at all.
class CaseFile {
 public:
  CaseFile(const std::string& path, const std::string& head)
      : file_(path.empty() ? nullptr : std::fopen(path.c_str(), "w")) {
    if (file_ != nullptr) std::fprintf(file_, "{%s\"cases\": [", head.c_str());
  }
  ~CaseFile() {
    if (file_ == nullptr) return;
    std::fprintf(file_, "\n]}\n");
    std::fclose(file_);
  }
  CaseFile(const CaseFile&) = delete;
  CaseFile& operator=(const CaseFile&) = delete;

  // `figures`: the members that only this benchmark has.
  void Add(const std::string& name, double microseconds, const std::string& figures, double error,
           const std::string& kernel) {
    if (file_ == nullptr) return;
    std::fprintf(
        file_, "%s\n{\"case\": \"%s\", \"us\": %.3f, %s, \"error\": %.3g, \"kernel\": \"%s\"}",
        first_ ? "" : ",", name.c_str(), microseconds, figures.c_str(), error, kernel.c_str());
    first_ = false;
  }

 private:
  FILE* const file_;
  bool first_ = true;
};

}  // namespace tributary::cuda
