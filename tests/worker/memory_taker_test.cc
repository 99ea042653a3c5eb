// A new cache's memory, taken beside everything else.
#include "worker/memory_taker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/worker/specs.h"
#include "worker/host_memory_ledger.h"
#include "worker/kv_shard.h"
#include "worker/memory_giver.h"

namespace tributary::worker {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kRoom = size_t{16} << 30;

Clock::time_point InAMinute() { return Clock::now() + std::chrono::minutes(1); }

// 32 MiB, or less than a piece.
std::unique_ptr<KvShard> MakeShard(bool large) {
  CacheSpec spec = testing::SmallSpec();
  spec.num_pages = large ? 4096 : 4;
  auto shard = KvShard::Create(spec, kRoom, PageFill::kPoison);
  return *std::move(shard);
}

std::unique_ptr<HostMemoryLedger::Claim> Claim(HostMemoryLedger& ledger, const KvShard& shard) {
  auto claim = ledger.Take(shard.bytes());
  return *std::move(claim);
}

bool IsPoisoned(const KvShard& shard) {
  const std::byte* const begin = shard.layer(0).base;
  return std::all_of(begin, begin + shard.bytes(),
                     [](std::byte b) { return b == std::byte{0xff}; });
}

TEST(MemoryTaker, TakesAllBesideItsCaller) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  const size_t before = ledger->Available();
  const auto shard = MakeShard(/*large=*/true);
  ASSERT_GT(shard->memory()->pieces(), 4u);
  MemoryThreads threads(3);
  MemoryTaker taker(shard->memory(), Claim(*ledger, *shard), threads);
  EXPECT_LT(ledger->Available(), before);
  EXPECT_FALSE(*taker.Await(Clock::now())) << "it has only just begun";
  EXPECT_TRUE(*taker.Await(InAMinute()));
  EXPECT_TRUE(*taker.Await(Clock::now()));
  EXPECT_TRUE(IsPoisoned(*shard));
  EXPECT_EQ(ledger->Available(), before) << "what is taken is the machine's to count";
}

TEST(MemoryTaker, ASinglePieceIsTakenAtOnce) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  const auto shard = MakeShard(/*large=*/false);
  MemoryThreads threads(3);
  MemoryTaker taker(shard->memory(), Claim(*ledger, *shard), threads);
  EXPECT_TRUE(*taker.Await(Clock::now()));
  EXPECT_TRUE(IsPoisoned(*shard));
}

TEST(MemoryTaker, EndsWhenTheMachineHasNoMoreToGive) {
  const auto room = std::make_shared<std::atomic<size_t>>(kRoom);
  const auto ledger = HostMemoryLedger::Create([room] { return room->load(); });
  const auto shard = MakeShard(/*large=*/true);
  MemoryThreads threads(2);
  MemoryTaker taker(shard->memory(), Claim(*ledger, *shard), threads);
  *room = 0;
  EXPECT_EQ(taker.Await(InAMinute()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(taker.Await(InAMinute()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryTaker, MayBeGivenUpHalfWay) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  const size_t before = ledger->Available();
  MemoryThreads threads(2);
  {
    const auto shard = MakeShard(/*large=*/true);
    MemoryTaker taker(shard->memory(), Claim(*ledger, *shard), threads);
    EXPECT_FALSE(*taker.Await(Clock::now()));
  }
  EXPECT_EQ(ledger->Available(), before);
}

// Whoever drops a cache does not wait until its memory is unmapped.
TEST(MemoryGiver, MemoryIsGivenBackByAnotherThread) {
  MemoryThreads threads(1);
  const std::thread::id own = std::this_thread::get_id();
  std::atomic<bool> here = true;
  std::latch gone{1};
  const auto note = [&](const int* number) {
    delete number;
    here = std::this_thread::get_id() == own;
    gone.count_down();
  };
  threads.Drop(std::shared_ptr<const int>(new int, note));
  gone.wait();
  EXPECT_FALSE(here);
}

TEST(MemoryGiver, AllOfItIsGivenBackAndCountsUntilThen) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  const size_t before = ledger->Available();
  const auto shard = MakeShard(/*large=*/true);
  const std::weak_ptr<ShardMemory> memory = shard->memory();
  {
    MemoryThreads threads(2);
    MemoryTaker taker(shard->memory(), Claim(*ledger, *shard), threads);
    EXPECT_TRUE(*taker.Await(InAMinute()));
    GiveBack(shard->memory(), ledger, threads);
  }
  EXPECT_EQ(ledger->Available(), before);
  EXPECT_EQ(memory.use_count(), 1) << "the shard's, which is still there";
  const std::byte* const begin = shard->memory()->data();
  EXPECT_TRUE(std::all_of(begin, begin + shard->bytes(), [](std::byte b) {
    return b == std::byte{0};
  })) << "what was written is gone";
}

// A cache is not held up by a larger one that came before it, nor by one that is given up.
TEST(MemoryTaker, CachesTakeTurns) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  MemoryThreads threads(1);
  std::vector<std::unique_ptr<KvShard>> shards;
  std::vector<std::unique_ptr<MemoryTaker>> takers;
  for (int i = 0; i < 4; ++i) {
    shards.push_back(MakeShard(/*large=*/true));
    takers.push_back(std::make_unique<MemoryTaker>(shards.back()->memory(),
                                                   Claim(*ledger, *shards.back()), threads));
    EXPECT_FALSE(*takers.back()->Await(Clock::now()));
  }
  takers[1].reset();
  shards[1].reset();
  for (const size_t i : {3, 2, 0}) {
    EXPECT_TRUE(*takers[i]->Await(InAMinute()));
    EXPECT_TRUE(IsPoisoned(*shards[i]));
  }
}

}  // namespace
}  // namespace tributary::worker
