// What a rank of a direct exchange does when the group is broken: on one GPU, whose memory stands
// for that of every rank.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/direct/direct_kernel.h"
#include "collective/direct/direct_layout.h"
#include "collective/direct/direct_protocol.cuh"
#include "tests/kernels/cuda/slow_copy.h"

namespace tributary::collective {
namespace {

constexpr int kRanks = 3;
constexpr int kRows = 2;
constexpr int kHeads = 6;
constexpr int kDim = 128;

// Every thread finds another rank to be late.
__global__ void FailEverywhere(const __grid_constant__ DirectArgs args, uint32_t salt) {
  const uint32_t word = blockIdx.x * blockDim.x + threadIdx.x + salt;
  direct::Fail(args, DirectFailureWord(DirectFailure::kLate, 1 + word % 0xfffe));
}

class DirectFailureTest : public testing::Test {
 protected:
  void SetUp() override {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) GTEST_SKIP() << "needs a GPU";
    args_.layout = LayOutDirect(kRanks, kRows, kHeads, kDim, DType::kF32);
    for (int r = 0; r < kRanks; ++r) {
      args_.memory[r] = Allocate(args_.layout.bytes(0));
      ASSERT_EQ(cudaMemset(args_.memory[r], 0, args_.layout.bytes(0)), cudaSuccess);
    }
    ASSERT_EQ(cudaHostAlloc(&told_, sizeof(*told_), cudaHostAllocDefault), cudaSuccess);
    *told_ = 0;
    args_.host_failure = told_;
    args_.bound_ns = 1'000'000'000;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    for (std::byte* memory : allocated_) cudaFree(memory);
    if (told_ != nullptr) cudaFreeHost(told_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  std::byte* Allocate(size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    allocated_.push_back(static_cast<std::byte*>(memory));
    return allocated_.back();
  }
  uint32_t Word(int rank, size_t at) const {
    uint32_t word = 0;
    EXPECT_EQ(cudaMemcpy(&word, args_.memory[rank] + at, sizeof(word), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return word;
  }
  void FailWith(uint32_t salt) {
    FailEverywhere<<<64, 256, 0, stream_>>>(args_, salt);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  DirectArgs args_;
  uint32_t* told_ = nullptr;  // to the host
  cudaStream_t stream_ = nullptr;
  std::vector<std::byte*> allocated_;
};

// However many find something at once, and whatever peers say meanwhile.
TEST_F(DirectFailureTest, TheFirstFailureStays) {
  FailWith(0);
  const uint32_t first = *told_;
  EXPECT_EQ(WhatFailed(first), DirectFailure::kLate);
  EXPECT_EQ(Word(0, args_.layout.first_failure()), first);
  EXPECT_EQ(Word(0, args_.layout.failure()), first);
  const uint32_t gave_up = DirectFailureWord(DirectFailure::kTold, 1u << args_.rank);
  for (int r = 1; r < kRanks; ++r) {
    EXPECT_EQ(Word(r, args_.layout.failure()), gave_up);
    EXPECT_EQ(Word(r, args_.layout.first_failure()), 0u) << "that is for rank " << r << " to say";
  }
  FailWith(7);
  EXPECT_EQ(*told_, first);
  const uint32_t of_peer = DirectFailureWord(DirectFailure::kTold, 2);
  ASSERT_EQ(cudaMemcpy(args_.memory[0] + args_.layout.failure(), &of_peer, sizeof(of_peer),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  FailWith(11);
  EXPECT_EQ(*told_, first);
  EXPECT_EQ(Word(0, args_.layout.first_failure()), first);
}

// The partial never comes, because the group is broken. What is enqueued behind the exchange still
// comes after the launch ahead of it, which lets the exchange begin early.
TEST_F(DirectFailureTest, AnExchangeThatGivesUpWaitsForTheLaunchAhead) {
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major < 9) GTEST_SKIP() << "this GPU overlaps no launches";
  constexpr size_t kOutput = size_t{kRows} * kHeads * kDim * sizeof(float);
  constexpr size_t kLse = size_t{kRows} * kHeads * sizeof(float);
  DirectShape shape{.rows = kRows, .heads = kHeads, .value_dim = kDim};
  shape.wire = shape.out = DType::kF32;
  ASSERT_TRUE(PlanDirect(shape, args_.layout, {}, &args_.plan));
  args_.rows = kRows;
  args_.heads = kHeads;
  args_.value_dim = kDim;
  args_.out_dtype = DType::kF32;
  args_.partial_arrives = true;
  args_.o = Allocate(kOutput);
  args_.lse = reinterpret_cast<float*>(Allocate(kLse));
  args_.out = Allocate(kOutput);
  args_.lse_out = reinterpret_cast<float*>(Allocate(kLse));
  ASSERT_EQ(cudaMemset(args_.o, 0xff, kOutput), cudaSuccess);
  ASSERT_EQ(cudaMemset(args_.lse, 0xff, kLse), cudaSuccess);
  SetHeads(&args_);
  const uint32_t broken = DirectFailureWord(DirectFailure::kTold, 2);
  ASSERT_EQ(cudaMemcpy(args_.memory[0] + args_.layout.failure(), &broken, sizeof(broken),
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  constexpr size_t kBytes = 4096;
  std::byte* const ones = Allocate(kBytes);
  std::byte* const seen = Allocate(kBytes);
  std::byte* const copied = Allocate(kBytes);
  ASSERT_EQ(cudaMemset(ones, 1, kBytes), cudaSuccess);
  for (int launch = 0; launch < 3; ++launch) {
    ASSERT_EQ(cudaMemset(seen, 0, kBytes), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cuda::LaunchSlowCopy(ones, seen, kBytes, /*microseconds=*/5000, stream_),
              cudaSuccess);
    const Status status =
        LaunchDirect(args_, DType::kF32, DType::kF32, /*overlap_launch=*/true, stream_);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cuda::LaunchSlowCopy(seen, copied, kBytes, /*microseconds=*/0, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    std::vector<uint8_t> bytes(kBytes);
    ASSERT_EQ(cudaMemcpy(bytes.data(), copied, kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_THAT(bytes, testing::Each(1));
    EXPECT_EQ(*told_, broken);
  }
}

}  // namespace
}  // namespace tributary::collective
