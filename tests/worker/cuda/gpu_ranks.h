// Ranks with a GPU backend each.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/ranks.h"
#include "tests/worker/test_host.h"
#include "worker/cuda_backend.h"

namespace tributary::worker::testing {

// Why there is nothing to run on; empty when there is.
inline std::string NoGpu() {
  const absl::Status status = CheckGpus(0, 1);
  return status.ok() ? "" : std::string(status.message());
}

#define TRIBUTARY_SKIP_WITHOUT_GPU()                                                     \
  if (const std::string reason = ::tributary::worker::testing::NoGpu(); !reason.empty()) \
  GTEST_SKIP() << reason

// One backend per rank, dealt out over the GPUs there are.
inline std::vector<std::unique_ptr<Backend>> GpuBackends(int size,
                                                         const CudaBackendOptions& options) {
  std::vector<std::unique_ptr<Backend>> backends;
  const absl::StatusOr<int> gpus = CountGpus();
  for (int rank = 0; rank < size; ++rank) {
    CudaBackendOptions own = options;
    own.gpu = rank % *gpus;
    absl::StatusOr<std::unique_ptr<Backend>> backend = CreateCudaBackend(own);
    if (!backend.ok()) {
      ADD_FAILURE() << backend.status();
      break;
    }
    backends.push_back(*std::move(backend));
  }
  return backends;
}

class GpuRanks : public ThreadRanks {
 public:
  explicit GpuRanks(int size, const CudaBackendOptions& options = {},
                    const ExecutorOptions& executor = Poisoned())
      : ThreadRanks(GpuBackends(size, options), executor) {}
};

// Products are of bf16 or f16, and weights are rounded to it. Values are about 1 in size and
// averaged, so that an absolute bound is the meaningful one; tests/kernels/cuda holds the kernels
// to narrower ones. A key too many or too few in the lengths tested is far outside.
inline TestHost::Options GpuTolerance(TestHost::Options options = {}) {
  options.o_tolerance = test::Tolerance{3e-2, 0};
  options.lse_tolerance = test::Tolerance{3e-2, 0};
  return options;
}

// Of FP8 and f16 caches, for steps that read nothing but the cache.
inline TestHost::Options TightGpuTolerance(TestHost::Options options = {}) {
  options.o_tolerance = test::Tolerance{4e-3, 0};
  options.lse_tolerance = test::Tolerance{4e-3, 0};
  return options;
}

}  // namespace tributary::worker::testing
