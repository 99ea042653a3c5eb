// A new cache's memory, taken beside everything else.
#include "worker/memory_taker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <utility>

#include "tests/worker/specs.h"
#include "worker/host_memory_ledger.h"
#include "worker/kv_shard.h"

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
  ASSERT_GT(shard->pieces(), 4u);
  MemoryTaker taker(*shard, Claim(*ledger, *shard), 3);
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
  MemoryTaker taker(*shard, Claim(*ledger, *shard), 3);
  EXPECT_TRUE(*taker.Await(Clock::now()));
  EXPECT_TRUE(IsPoisoned(*shard));
}

TEST(MemoryTaker, EndsWhenTheMachineHasNoMoreToGive) {
  const auto room = std::make_shared<std::atomic<size_t>>(kRoom);
  const auto ledger = HostMemoryLedger::Create([room] { return room->load(); });
  const auto shard = MakeShard(/*large=*/true);
  MemoryTaker taker(*shard, Claim(*ledger, *shard), 2);
  *room = 0;
  EXPECT_EQ(taker.Await(InAMinute()).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(taker.Await(InAMinute()).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MemoryTaker, MayBeGivenUpHalfWay) {
  const auto ledger = HostMemoryLedger::Create([] { return kRoom; });
  const size_t before = ledger->Available();
  const auto shard = MakeShard(/*large=*/true);
  {
    MemoryTaker taker(*shard, Claim(*ledger, *shard), 2);
    EXPECT_FALSE(*taker.Await(Clock::now()));
  }
  EXPECT_EQ(ledger->Available(), before);
}

}  // namespace
}  // namespace tributary::worker
