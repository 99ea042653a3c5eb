// The worker's correctness scenarios over four processes and Gloo: the same as over threads,
// through the protocol.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/fault/group_harness.h"
#include "tests/fault/programs.h"
#include "tests/worker/scenarios.h"
#include "tests/worker/specs.h"

namespace tributary::test {
namespace {

using worker::CacheSpec;
using worker::StepKind;
using worker::testing::PagedSpec;
using worker::testing::TestHost;

constexpr int kSize = 4;

// One group for all cases.
class ProcessGrid : public ::testing::Test {
 public:
  static void SetUpTestSuite() {
    harness_ = new GroupHarness(GroupHarness::Options(kSize));
    for (int rank = 0; rank < kSize; ++rank) {
      workers_.push_back(StartWorker(harness_->directory(), harness_->address(), rank));
    }
    epoch_ = harness_->WaitFormed(0).epoch;
  }
  static void TearDownTestSuite() {
    workers_.clear();
    delete harness_;
    harness_ = nullptr;
  }

 protected:
  void SetUp() override { ASSERT_EQ(epoch_, 1u); }
  void TearDown() override { EXPECT_THAT(harness_->broken(), ::testing::IsEmpty()); }
  static RemoteRanks Ranks() { return RemoteRanks(*harness_, epoch_); }

 private:
  static inline GroupHarness* harness_ = nullptr;
  static inline std::vector<std::unique_ptr<ChildProcess>> workers_;
  static inline uint64_t epoch_ = 0;
};

class BoundaryLengths : public ProcessGrid,
                        public ::testing::WithParamInterface<std::tuple<int, DType>> {};

TEST_P(BoundaryLengths, DecodeVerifyPrefill) {
  const auto [interleave, kv_dtype] = GetParam();
  CacheSpec spec = PagedSpec(16, interleave, kv_dtype);
  spec.layers.resize(2);
  spec.layers[1].window.left = 20;
  spec.layers[1].sinks.assign(static_cast<size_t>(spec.q_heads), 0.5f);
  RemoteRanks ranks = Ranks();
  RunBoundaryLengths(ranks, spec, {});
}

INSTANTIATE_TEST_SUITE_P(Grid, BoundaryLengths,
                         ::testing::Values(std::tuple(1, DType::kFp8E4M3),
                                           std::tuple(8, DType::kFp8E5M2),
                                           std::tuple(16, DType::kBf16),
                                           std::tuple(16, DType::kF16)));

TEST_F(ProcessGrid, ChunkedPrefill) {
  RemoteRanks ranks = Ranks();
  RunChunkedPrefill(ranks, PagedSpec(16, 8, DType::kFp8E4M3), {}, {70, 9, 33, 1, 80});
}

TEST_F(ProcessGrid, ForkAndTruncate) {
  RemoteRanks ranks = Ranks();
  RunForkAndTruncate(ranks, PagedSpec(16, 16, DType::kFp8E4M3), {});
}

TEST_F(ProcessGrid, MixedBatchesRepeatsAndConflicts) {
  RemoteRanks ranks = Ranks();
  RunMixedBatches(ranks, PagedSpec(16, 4, DType::kBf16), {});
}

TEST_F(ProcessGrid, DeadSlotsAreNotRead) {
  RemoteRanks ranks = Ranks();
  RunPoisonedSlots(ranks, PagedSpec(16, 4, DType::kBf16), {});
}

// Tensors large enough to travel as slices of their own, and more than one message frame.
TEST_F(ProcessGrid, LargeTensors) {
  RemoteRanks ranks = Ranks();
  CacheSpec spec = PagedSpec(64, 64, DType::kFp8E4M3);
  TestHost::Options options;
  options.q_dtype = DType::kF32;
  options.input_dtype = DType::kF32;
  TestHost host(ranks, spec, options);
  host.set_row_stride(37);
  host.Open(1);
  host.Step(StepKind::kPrefill, {{1, 700, 700}});
  host.Step(StepKind::kDecode, {{1, 1, 1}});
}

}  // namespace
}  // namespace tributary::test
