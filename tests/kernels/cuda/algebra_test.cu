// The algebra that host and device share gives the same results on both.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/key_range.h"
#include "kernels/lse.h"
#include "kernels/paged_kv.h"

namespace tributary {
namespace {

struct Case {
  DcpLayout layout;
  KeyRange global;
  float lse_a;
  float lse_b;
};

struct Result {
  KeyRange local;
  MergeWeights<float> weights;
  float sink_scale;
};

__host__ __device__ Result Evaluate(const Case& c) {
  const MergeWeights<float> weights = Merge(c.lse_a, c.lse_b);
  return {LocalRange(c.layout, c.global), weights, SinkScale(weights.lse, 0.5f)};
}

__global__ void EvaluateAll(const Case* cases, Result* results, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) results[i] = Evaluate(cases[i]);
}

std::vector<Case> Cases() {
  const float empty = EmptyLse<float>();
  std::vector<Case> cases;
  for (int size : {1, 3, 4}) {
    for (int rank = 0; rank < size; ++rank) {
      for (int64_t length : {0, 1, 15, 16, 64, 65, 1000}) {
        const DcpLayout layout{rank, size, 16};
        cases.push_back({layout, {0, length}, 1.5f, -2.0f});
        cases.push_back({layout, {length / 3, length}, empty, 3.0f});
        cases.push_back({layout, {length, length}, empty, empty});
      }
    }
  }
  return cases;
}

TEST(CudaAlgebraTest, DeviceAgreesWithHost) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    GTEST_SKIP() << "no CUDA device on this machine";
  }
  const std::vector<Case> cases = Cases();
  Case* device_cases = nullptr;
  Result* device_results = nullptr;
  ASSERT_EQ(cudaMalloc(&device_cases, cases.size() * sizeof(Case)), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&device_results, cases.size() * sizeof(Result)), cudaSuccess);
  ASSERT_EQ(
      cudaMemcpy(device_cases, cases.data(), cases.size() * sizeof(Case), cudaMemcpyHostToDevice),
      cudaSuccess);
  const int count = static_cast<int>(cases.size());
  EvaluateAll<<<(count + 127) / 128, 128>>>(device_cases, device_results, count);
  std::vector<Result> results(cases.size());
  ASSERT_EQ(cudaMemcpy(results.data(), device_results, results.size() * sizeof(Result),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Result expected = Evaluate(cases[i]);
    EXPECT_EQ(results[i].local.lo, expected.local.lo) << "case " << i;
    EXPECT_EQ(results[i].local.hi, expected.local.hi) << "case " << i;
    EXPECT_NEAR(results[i].weights.a, expected.weights.a, 1e-6f) << "case " << i;
    EXPECT_NEAR(results[i].weights.b, expected.weights.b, 1e-6f) << "case " << i;
    if (std::isinf(expected.weights.lse)) {
      EXPECT_EQ(results[i].weights.lse, expected.weights.lse) << "case " << i;
    } else {
      EXPECT_NEAR(results[i].weights.lse, expected.weights.lse, 1e-5f) << "case " << i;
    }
    EXPECT_NEAR(results[i].sink_scale, expected.sink_scale, 1e-6f) << "case " << i;
  }
  cudaFree(device_cases);
  cudaFree(device_results);
}

}  // namespace
}  // namespace tributary
