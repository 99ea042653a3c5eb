// Ranks on either device, for tests that hold for both.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "collective/exchange/strategy.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/worker/cuda/gpu_ranks.h"
#include "tests/worker/ranks.h"
#include "worker/backends.h"
#include "worker/cpu_backend.h"

namespace tributary::worker::testing {

// Why the device is not there; empty when it is.
inline std::string WhyNoDevice(Device device) { return device == Device::kCpu ? "" : NoGpu(); }

// Of one thread each, or dealt out over the GPUs there are.
inline ThreadRanks::MakeBackend BackendsOn(Device device) {
  return [device](int rank) -> std::unique_ptr<Backend> {
    if (device == Device::kCpu) {
      return CreateCpuBackend(std::make_shared<cpu::ThreadPool>(1), collective::Strategy::kAuto);
    }
    absl::StatusOr<std::unique_ptr<Backend>> backend =
        CreateCudaBackend({.gpu = rank % std::max(1, CountGpus().value_or(1))});
    EXPECT_TRUE(backend.ok()) << backend.status();
    return backend.ok() ? *std::move(backend) : nullptr;
  };
}

}  // namespace tributary::worker::testing
