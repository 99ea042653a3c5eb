// What a GPU backend says of itself and refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "tests/worker/cuda/gpu_ranks.h"
#include "worker/self_test.h"

namespace tributary::worker::testing {
namespace {

using ::testing::HasSubstr;

TEST(CudaBackendTest, AGpuThatIsNotThereIsRefusedWithTheReason) {
  const absl::Status status = CreateCudaBackend({.gpu = 4096}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  const absl::Status check = CheckGpus(4000, 2);
  EXPECT_EQ(check.code(), absl::StatusCode::kFailedPrecondition) << check;
}

TEST(CudaBackendTest, CapabilitiesAreThoseOfTheRegistry) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto backend = CreateCudaBackend({});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ(&(*backend)->capabilities(), &CudaBackend());
  EXPECT_GT((*backend)->AvailableMemory(), 0u);
}

// As a worker does before it is ready, and then makes its own.
TEST(CudaBackendTest, EveryGpuPassesTheSelfTest) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  for (int gpu = 0; gpu < *CountGpus(); ++gpu) {
    for (int i = 0; i < 2; ++i) {
      auto backend = CreateCudaBackend({.gpu = gpu});
      ASSERT_TRUE(backend.ok()) << backend.status();
      const absl::Status passed = SelfTest(*std::move(backend));
      EXPECT_TRUE(passed.ok()) << "GPU " << gpu << ": " << passed;
    }
  }
}

TEST(CudaBackendTest, ACacheBeyondTheMemoryIsRefusedWithTheSizes) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  CacheSpec spec = SmallSpec();
  GpuRanks ranks(1);
  Command command;
  command.epoch = ranks.epoch();
  command.cache = 1;
  spec.num_pages = 1 << 30;
  command.body = CreateCacheCommand{spec};
  const absl::Status refused = ranks.Execute(command).at(0).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes on each rank"));
  EXPECT_EQ(ranks.executor(0).memory_used(), 0u);
  // The device still works.
  spec.num_pages = 64;
  command.body = CreateCacheCommand{spec};
  EXPECT_TRUE(ranks.Execute(command).at(0).status.ok());
  EXPECT_EQ(ranks.executor(0).memory_used(), *ShardBytes(spec));
}

// More than half of what there is, again and again.
TEST(CudaBackendTest, MemoryOfADroppedCacheIsGivenBack) {
  TRIBUTARY_SKIP_WITHOUT_GPU();
  const auto backend = CreateCudaBackend({});
  ASSERT_TRUE(backend.ok()) << backend.status();
  CacheSpec spec = SmallSpec();
  const size_t page = *ShardBytes(spec) / static_cast<size_t>(spec.num_pages);
  const size_t pages = (*backend)->AvailableMemory() / page;
  spec.num_pages = static_cast<int32_t>(std::min<size_t>(pages * 6 / 10, INT32_MAX));
  for (int i = 0; i < 3; ++i) {
    const size_t available = (*backend)->AvailableMemory();
    const auto shard = (*backend)->CreateShard(spec, available, PageFill::kZero);
    ASSERT_TRUE(shard.ok()) << shard.status();
  }
}

}  // namespace
}  // namespace tributary::worker::testing
