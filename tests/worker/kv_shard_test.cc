#include "worker/kv_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/worker/test_host.h"

namespace tributary::worker {
namespace {

constexpr size_t kAnySize = std::numeric_limits<size_t>::max();

std::span<std::byte> Page(const KvShard& shard, int32_t layer, int32_t page) {
  const PagedKv& kv = shard.layer(layer);
  return {KeyPlane(kv, page, 0), PageBytes(kv)};
}

void Fill(const KvShard& shard, int32_t layer, int32_t page, int value) {
  const auto bytes = Page(shard, layer, page);
  std::memset(bytes.data(), value, bytes.size());
}

bool AllAre(std::span<const std::byte> bytes, int value) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte b) { return b == static_cast<std::byte>(value); });
}

TEST(KvShard, LayersAndPagesDoNotOverlap) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(3);
  spec.num_pages = 5;
  auto shard = KvShard::Create(spec, kAnySize, PageFill::kZero);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ((*shard)->bytes(), *ShardBytes(spec));
  EXPECT_TRUE(AllAre(Page(**shard, 2, 4), 0));
  for (int32_t layer = 0; layer < 3; ++layer) {
    for (int32_t page = 0; page < 5; ++page) Fill(**shard, layer, page, 1 + layer * 5 + page);
  }
  for (int32_t layer = 0; layer < 3; ++layer) {
    for (int32_t page = 0; page < 5; ++page) {
      EXPECT_TRUE(AllAre(Page(**shard, layer, page), 1 + layer * 5 + page));
    }
  }
}

TEST(KvShard, ScalesAreOneAHead) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(2);
  spec.layers[1].k_scale = {0.5f};
  spec.layers[1].v_scale = {2.0f, 3.0f};
  auto shard = KvShard::Create(spec, kAnySize, PageFill::kZero);
  ASSERT_TRUE(shard.ok());
  const PagedKv& kv = (*shard)->layer(1);
  EXPECT_EQ(kv.k_scale[0], 0.5f);
  EXPECT_EQ(kv.k_scale[1], 0.5f);
  EXPECT_EQ(kv.v_scale[1], 3.0f);
  EXPECT_EQ((*shard)->layer(0).k_scale[1], 1.0f);
}

TEST(KvShard, CopiesPagesOfAllLayersInOrder) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(4);
  auto shard = KvShard::Create(spec, kAnySize, PageFill::kZero);
  ASSERT_TRUE(shard.ok());
  for (int32_t layer = 0; layer < 4; ++layer) {
    Fill(**shard, layer, 1, 10 + layer);
    Fill(**shard, layer, 2, 20 + layer);
  }
  cpu::ThreadPool pool(2);
  (*shard)->CopyPages({{1, 3}, {2, 1}, {3, 4}, {4, 4}}, pool);
  for (int32_t layer = 0; layer < 4; ++layer) {
    EXPECT_TRUE(AllAre(Page(**shard, layer, 3), 10 + layer));
    EXPECT_TRUE(AllAre(Page(**shard, layer, 1), 20 + layer));
    EXPECT_TRUE(AllAre(Page(**shard, layer, 2), 20 + layer));
    EXPECT_TRUE(AllAre(Page(**shard, layer, 4), 10 + layer));
  }
}

TEST(KvShard, PoisonFillsEveryByte) {
  CacheSpec spec = testing::SmallSpec();
  spec.num_pages = 1024;  // beyond a huge page: the aligned mapping
  auto shard = KvShard::Create(spec, kAnySize, PageFill::kPoison);
  ASSERT_TRUE(shard.ok());
  size_t taken = 0;
  const ShardMemory& memory = *(*shard)->memory();
  for (size_t piece = 0; piece < memory.pieces(); ++piece) taken += memory.TakePiece(piece);
  EXPECT_EQ(taken, (*shard)->bytes());
  EXPECT_EQ(reinterpret_cast<uintptr_t>((*shard)->layer(0).base) % (size_t{2} << 20), 0u);
  EXPECT_TRUE(AllAre(Page(**shard, 0, 0), 0xff));
  EXPECT_TRUE(AllAre(Page(**shard, 0, 1023), 0xff));
}

TEST(KvShard, TooLargeIsRefusedWithTheSizes) {
  const CacheSpec spec = testing::SmallSpec();
  const size_t bytes = *ShardBytes(spec);
  EXPECT_TRUE(KvShard::Create(spec, bytes, PageFill::kZero).ok());
  const absl::Status status = KvShard::Create(spec, bytes - 1, PageFill::kZero).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(std::to_string(bytes - 1)));
}

}  // namespace
}  // namespace tributary::worker
