// The whole service over worker processes with a GPU each that exchange in device memory: right
// numbers, and processes that are killed, stopped and continued under load. Hosts check every reply
// against float64 attention, and every call against its deadline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>

#include "tests/fault/fleet.h"
#include "worker/cuda_backend.h"

namespace tributary::test {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// Products are of bf16 (tests/worker/cuda/gpu_ranks.h).
constexpr Tolerance kGpuTolerance{3e-2, 0};

FleetOptions OnGpus(int workers) {
  return {.workers = workers,
          .coordinator_flags = {"--device=cuda", "--step_timeout=5s"},
          .worker_flags = {"--device=cuda"},
          .tolerance = kGpuTolerance};
}

class GpuFleet : public Fleet {
 protected:
  explicit GpuFleet(int workers) : Fleet(OnGpus(workers)) {}

  void SetUp() override {
    if (const absl::Status gpus = worker::CheckGpus(0, options_.workers); !gpus.ok()) {
      GTEST_SKIP() << gpus.message();
    }
    Fleet::SetUp();
    if (HasFatalFailure()) return;
    for (const auto& worker : workers_) {
      ASSERT_THAT(worker->Log(), HasSubstr("partials meet in device memory"));
    }
  }

  SequenceHost Host(uint64_t id) { return {stub_, id, kGpuTolerance}; }
};

class TwoGpus : public GpuFleet {
 protected:
  TwoGpus() : GpuFleet(2) {}
};
class FourGpus : public GpuFleet {
 protected:
  FourGpus() : GpuFleet(4) {}
};

void DecodeVerifyPrefill(SequenceHost& host) {
  ASSERT_TRUE(host.Open().ok());
  for (const int rows : {1, 2, 100, 1, 4, 16, 63, 1, 200, 1, 1, 1, 1}) {
    EXPECT_TRUE(host.Step(rows).ok());
  }
  EXPECT_TRUE(host.Look(3).ok());
  EXPECT_TRUE(host.Look(350).ok());
  EXPECT_TRUE(host.Truncate(37).ok());
  EXPECT_TRUE(host.Step(9).ok());
}

TEST_F(TwoGpus, DecodeVerifyPrefill) {
  SequenceHost host = Host(1);
  DecodeVerifyPrefill(host);
}

// CUDA and NCCL take seconds to begin, and may be in the middle of it.
TEST_F(TwoGpus, WorkersLeaveInPeaceWhileTheirGroupForms) {
  LeaveWhileForming(6, std::chrono::milliseconds(400));
  SequenceHost host = Host(1);
  ASSERT_TRUE(host.Open().ok());
  EXPECT_TRUE(host.Step(70).ok());
}

TEST_F(FourGpus, DecodeVerifyPrefill) {
  SequenceHost host = Host(1);
  DecodeVerifyPrefill(host);
}

TEST_F(FourGpus, AKilledWorkerUnderLoad) {
  Load load(stub_, 4, 4, kGpuTolerance);
  ASSERT_NO_FATAL_FAILURE(KillUnderLoad(load, 3));
  for (int host = 0; host < 4; ++host) EXPECT_EQ(load.counts(host).lost, 1) << host;
  for (int host = 4; host < 8; ++host) EXPECT_EQ(load.counts(host).lost, 0) << host;
  ExpectPagesAccountedFor(load.hosts());
}

// Its late stores, if it has any ahead of it, land in memory of the epoch gone by.
TEST_F(FourGpus, AStoppedWorkerUnderLoad) {
  Load load(stub_, 4, 4, kGpuTolerance);
  ASSERT_NO_FATAL_FAILURE(PauseUnderLoad(load, 1));
  for (int host = 0; host < 8; ++host) EXPECT_EQ(load.counts(host).lost, 0) << host;
  ExpectPagesAccountedFor(load.hosts());
}

// Workers are killed or stopped again and again while hosts go on.
TEST_F(FourGpus, RandomMembership) {
  constexpr int kTimes = 10;
  std::mt19937 random(11);
  Load load(stub_, 4, 0, kGpuTolerance);
  for (int time = 0; time < kTimes; ++time) {
    ASSERT_TRUE(load.WaitOk(25));
    const size_t victim = random() % workers_.size();
    if (random() % 2 == 0) {
      workers_[victim]->Signal(SIGKILL);
      ASSERT_EQ(workers_[victim]->Wait(seconds(10)), -SIGKILL);
      ASSERT_TRUE(WaitForming());
      workers_[victim] = Worker(static_cast<int>(victim));
    } else {
      workers_[victim]->Pause();
      ASSERT_TRUE(WaitForming());
      workers_[victim]->Resume();
    }
    ASSERT_TRUE(Eventually(kPatience, [&] { return Topology().state() == v1::GROUP_STATE_READY; }));
  }
  ASSERT_TRUE(load.WaitOk(10));
  load.Stop();
  ExpectPagesAccountedFor(load.hosts());
}

}  // namespace
}  // namespace tributary::test
