// What a rank keeps for another: when it begins and ends, and the memory that it takes. That the
// kept bytes are right, replica_test.cc shows.
#include "worker/replica_keeper.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "collective/in_process.h"
#include "kernels/cpu/thread_pool.h"
#include "tests/worker/specs.h"
#include "worker/cpu_backend.h"

namespace tributary::worker::testing {
namespace {

using Clock = std::chrono::steady_clock;

class ReplicaKeeperTest : public ::testing::Test {
 protected:
  ReplicaKeeperTest() : spec_(SmallSpec()) { spec_.num_pages = 400; }

  // Of rank 1 of 3, so that rank 0 is its ward.
  ReplicaKeeper Keeper() const { return {spec_, {1, 3, spec_.interleave}}; }
  ReplicaKeeper::Memory Memory(size_t available = SIZE_MAX) { return {*backend_, available}; }
  size_t Bytes() const { return *ShardBytes(spec_); }

  CacheSpec spec_;
  std::unique_ptr<Backend> backend_ =
      CreateCpuBackend(std::make_shared<cpu::ThreadPool>(1), collective::Strategy::kAuto);
  const TransferPagesCommand keep_{.rank = 0, .restore = false, .pages = {}};
  const TransferPagesCommand restored_{.rank = 0, .restore = true, .pages = {}, .complete = true};
};

TEST_F(ReplicaKeeperTest, WhoKeepsNothingHasNothingToDo) {
  ReplicaKeeper keeper = Keeper();
  EXPECT_EQ(keeper.bytes(), 0u);
  EXPECT_TRUE(*keeper.TakeMemory(Clock::now()));
  EXPECT_TRUE(keeper.CopyPages({{0, 1}}).ok());
  EXPECT_EQ(keeper.ward(), -1);
  EXPECT_EQ(keeper.kept(), nullptr);
  // A transfer from it fails at once, before it waits for anybody.
  const auto shard = *backend_->CreateShard(spec_, SIZE_MAX, PageFill::kZero);
  const auto group = collective::CreateInProcessGroup(3, 1);
  TransferPagesCommand transfer{.rank = 0, .restore = true, .pages = {2}};
  ParcelCarrier parcels(*backend_, /*least_lane_bytes=*/1);
  const auto in_an_hour = Clock::now() + std::chrono::hours(1);
  EXPECT_EQ(keeper.Pass(transfer, *shard, parcels, *group[1], in_an_hour).code(),
            absl::StatusCode::kInternal);
}

TEST_F(ReplicaKeeperTest, KeepsForAHandOverUntilThePagesAreRestored) {
  ReplicaKeeper keeper = Keeper();
  int turns = 1;
  while (!*keeper.Turn(keep_, Memory(), Clock::now())) ++turns;
  EXPECT_GT(turns, 1) << "steps come in between";
  EXPECT_EQ(keeper.ward(), 0);
  EXPECT_GE(keeper.bytes(), Bytes());
  // Not its ward's.
  EXPECT_TRUE(*keeper.Turn({.rank = 1, .restore = true, .pages = {}, .complete = true}, Memory(),
                           Clock::now()));
  EXPECT_GT(keeper.bytes(), 0u);
  EXPECT_TRUE(*keeper.Turn(restored_, Memory(), Clock::now()));
  EXPECT_EQ(keeper.bytes(), 0u);
}

TEST_F(ReplicaKeeperTest, OthersKeepNothingForAHandOver) {
  ReplicaKeeper other(spec_, {2, 3, spec_.interleave});
  EXPECT_TRUE(*other.Turn(keep_, Memory(), Clock::now()));
  EXPECT_EQ(other.bytes(), 0u);
}

TEST_F(ReplicaKeeperTest, MemoryThatIsNotThereIsRefusedAndNothingKept) {
  ReplicaKeeper keeper = Keeper();
  EXPECT_EQ(keeper.Turn(keep_, Memory(Bytes() / 2), Clock::now()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(keeper.bytes(), 0u);
}

TEST_F(ReplicaKeeperTest, InCachesWithReplicasItKeepsAsLongAsTheCacheExists) {
  spec_.replica_stride = 1;
  ReplicaKeeper keeper = Keeper();
  ASSERT_TRUE(keeper.Begin(Memory()).ok());
  while (!*keeper.TakeMemory(Clock::now())) {
  }
  EXPECT_TRUE(*keeper.Turn(restored_, Memory(), Clock::now()));
  EXPECT_GE(keeper.bytes(), Bytes());
}

TEST_F(ReplicaKeeperTest, WhoJoinedLateIsToldWhenItLacksNothing) {
  spec_.replica_stride = 1;
  ReplicaKeeper keeper = Keeper();
  keeper.JoinedLate();
  EXPECT_TRUE(keeper.lacks_pages() && keeper.replica_lacks_pages());
  const auto told = [&](int rank, bool restore) {
    return *keeper.Turn({.rank = rank, .restore = restore, .pages = {}, .complete = true}, Memory(),
                        Clock::now());
  };
  EXPECT_TRUE(told(0, true) && told(1, false));  // others lack nothing
  EXPECT_TRUE(keeper.lacks_pages() && keeper.replica_lacks_pages());
  EXPECT_TRUE(told(1, true));
  EXPECT_FALSE(keeper.lacks_pages());
  EXPECT_TRUE(told(0, false));
  EXPECT_FALSE(keeper.replica_lacks_pages());
}

}  // namespace
}  // namespace tributary::worker::testing
