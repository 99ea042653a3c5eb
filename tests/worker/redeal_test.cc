// Tokens that are dealt over another number of ranks: where each goes, and that a group whose
// tokens were moved holds, and answers, what a group does that always had so many ranks, to the
// bit.
#include "worker/redeal.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/key_range.h"
#include "tests/worker/devices.h"
#include "tests/worker/ranks.h"
#include "tests/worker/specs.h"
#include "worker/replica.h"

namespace tributary::worker::testing {
namespace {

TEST(Redeal, SourcesAreThePagesWithTheSameTokens) {
  EXPECT_EQ(FirstSource({2, 4}, 1), 2);
  EXPECT_EQ(EndSource({2, 4}, 1), 4);
  EXPECT_EQ(FirstSource({4, 2}, 3), 1);
  EXPECT_EQ(EndSource({4, 2}, 3), 2);
  EXPECT_EQ(FirstSource({2, 3}, 1), 1);
  EXPECT_EQ(EndSource({2, 3}, 1), 3);
}

// Every token of a sequence arrives where a group of the other size has it.
TEST(Redeal, EveryTokenArrives) {
  constexpr int32_t kPageSize = 16;
  constexpr int64_t kTokens = 333;
  for (int32_t from = 1; from <= 5; ++from) {
    for (int32_t to = 1; to <= 5; ++to) {
      for (const int32_t interleave : {1, 2, 4, 8, 16}) {
        const RankChange ranks{from, to};
        const int64_t before = (kTokens + kPageSize * from - 1) / (kPageSize * from);
        const int64_t after = (kTokens + kPageSize * to - 1) / (kPageSize * to);
        std::map<std::pair<int32_t, int64_t>, std::pair<int32_t, int64_t>> source;
        for (int64_t index = 0; index < after; ++index) {
          MovedPage page{.page = static_cast<int32_t>(3 * index + 1), .index = index, .from = {}};
          for (int64_t i = FirstSource(ranks, index); i < std::min(before, EndSource(ranks, index));
               ++i) {
            page.from.push_back(static_cast<int32_t>(100 - i));
          }
          for (const RunMove& run : RunsOf(ranks, kPageSize, interleave, page)) {
            for (int32_t i = 0; i < interleave; ++i) {
              source[{run.to_rank, run.to_slot + i}] = {run.from_rank, run.from_slot + i};
            }
          }
        }
        for (int64_t token = 0; token < kTokens; ++token) {
          const auto place = [&](int32_t size, auto page_of) {
            const DcpLayout layout{0, size, interleave};
            const int64_t slot = LocalSlot(layout, token);
            return std::pair<int32_t, int64_t>(
                OwnerOf(layout, token), page_of(slot / kPageSize) * kPageSize + slot % kPageSize);
          };
          const auto found = source.find(place(to, [](int64_t i) { return 3 * i + 1; }));
          ASSERT_NE(found, source.end()) << "token " << token << ", " << from << " to " << to;
          EXPECT_EQ(found->second, place(from, [](int64_t i) { return 100 - i; }))
              << "token " << token << ", " << from << " to " << to << ", " << interleave;
        }
      }
    }
  }
}

TEST(Redeal, WhatWasGivenUpIsNotMoved) {
  const std::vector<RunMove> runs =
      RunsOf({2, 4}, 16, 16, {.page = 7, .index = 1, .from = {-1, 5}});
  ASSERT_EQ(runs.size(), 2u);  // the second half of the page
  for (const RunMove& run : runs) EXPECT_EQ(run.from_slot / 16, 5);
}

// [ranks before, ranks after, shape, what the ranks compute on]
class RedealRanksTest
    : public ::testing::TestWithParam<std::tuple<std::pair<int, int>, int, Device>> {
 protected:
  static constexpr CacheId kBefore = 3, kAfter = 5;
  static constexpr int32_t kTokens = 150;
  static constexpr SequenceId kSequence = 1;

  static CacheSpec SpecOf(int shape) {
    switch (shape) {
      case 0:
        return PagedSpec(16, 16, DType::kBf16);
      case 1:
        return PagedSpec(32, 8, DType::kFp8E4M3);
      case 2:
        return PagedSpec(128, 1, DType::kF16);
      case 3:
        return PagedSpec(64, 4, DType::kNvfp4);
      default:
        return LayersDifferSpec();
    }
  }

  RedealRanksTest() : spec_(SpecOf(std::get<1>(GetParam()))), values_(1 << 20) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(random);
  }

  void SetUp() override {
    const Device device = std::get<2>(GetParam());
    if (const std::string reason = WhyNoDevice(device); !reason.empty()) GTEST_SKIP() << reason;
    make_ = BackendsOn(device);
  }

  CacheSpec Spec(int32_t stride) const {
    CacheSpec spec = spec_;
    spec.num_pages = 16;
    spec.replica_stride = stride;
    return spec;
  }
  // The pages of the sequence in a group of so many ranks.
  std::vector<int32_t> PagesFor(int ranks, int32_t factor) const {
    std::vector<int32_t> pages;
    for (int32_t i = 0; i * spec_.page_size * ranks < kTokens; ++i) {
      pages.push_back((i * factor + 2) % 16);
    }
    return pages;
  }
  void Ok(ThreadRanks& ranks, CacheId cache, decltype(Command::body) body) {
    const auto replies = ranks.Execute(CommandOf(ranks.epoch(), ++number_, cache, std::move(body)));
    for (const auto& [rank, reply] : replies) {
      EXPECT_TRUE(reply.status.ok()) << "rank " << rank << ": " << reply.status;
      EXPECT_TRUE(reply.conflicts.empty()) << "rank " << rank;
    }
  }
  TensorView Values(size_t begin, int32_t rows, int32_t row) const {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(row);
    EXPECT_LE(begin + count, values_.size());
    return {reinterpret_cast<const std::byte*>(values_.data() + begin), DType::kF32, count * 4, {}};
  }
  void Append(ThreadRanks& ranks, CacheId cache, int64_t first, int32_t tokens, bool replay,
              const std::vector<PageUpdate>& updates = {}) {
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
      const KvGeometry kv = GeometryOf(spec_, spec_.layers[static_cast<size_t>(layer)]).kv;
      StepCommand step{.layer = layer, .kind = StepKind::kAppend};
      if (layer == 0) step.page_updates = updates;
      step.entries = {{kSequence, first, 0, tokens, replay}};
      step.k = Values(static_cast<size_t>(first) * 64, tokens, kv.kv_heads * kv.key_dim);
      step.v = Values(1000 + static_cast<size_t>(first) * 64, tokens, kv.kv_heads * kv.value_dim);
      Ok(ranks, cache, step);
    }
  }
  std::vector<float> Look(ThreadRanks& ranks, CacheId cache, int64_t length) {
    std::vector<float> seen;
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
      const LayerGeometry geometry = GeometryOf(spec_, spec_.layers[static_cast<size_t>(layer)]);
      StepCommand step{.layer = layer, .kind = StepKind::kDecode};
      step.entries = {{kSequence, length - 1, 1, 0, false}};
      step.q = Values(5, 1, geometry.q_heads * geometry.kv.key_dim);
      const auto replies =
          ranks.Execute(CommandOf(ranks.epoch(), ++number_, cache, std::move(step)));
      const Reply& root = replies.at(0);
      EXPECT_TRUE(root.status.ok()) << root.status;
      seen.insert(seen.end(), root.o.begin(), root.o.end());
      seen.insert(seen.end(), root.lse.begin(), root.lse.end());
    }
    return seen;
  }
  // A group of `before` ranks becomes one of `after`.
  void Change(ThreadRanks& ranks, int before, int after, int32_t stride) {
    const RankChange change{before, after};
    const std::vector<int32_t> old_pages = PagesFor(before, 5);
    const std::vector<int32_t> new_pages = PagesFor(after, 3);
    ranks.Resize(std::max(before, after), Poisoned(), before);
    Ok(ranks, kAfter, CreateCacheCommand{Spec(stride), /*existing=*/false, after});
    MoveTokensCommand move{.from_cache = kBefore, .ranks = change, .pages = {}};
    for (int64_t i = 0; i < std::ssize(new_pages); ++i) {
      const auto first = old_pages.begin() + FirstSource(change, i);
      const auto end =
          old_pages.begin() + std::min<int64_t>(std::ssize(old_pages), EndSource(change, i));
      move.pages.push_back(
          {.page = new_pages[static_cast<size_t>(i)], .index = i, .from = {first, end}});
    }
    Ok(ranks, kAfter, move);
    if (stride > 0) {
      move.keeper_stride = stride;
      Ok(ranks, kAfter, move);
    }
    Ok(ranks, kAfter, SetTablesCommand{{{kSequence, 0, new_pages}}});
    ranks.Resize(after, Poisoned(), after);
  }

  const CacheSpec spec_;
  ThreadRanks::MakeBackend make_;
  std::vector<float> values_;
  uint64_t number_ = 0;
};

TEST_P(RedealRanksTest, IsAsIfThereHadAlwaysBeenSoMany) {
  const auto [before, after] = std::get<0>(GetParam());
  const int32_t stride = after > 1 ? 1 : 0;
  ThreadRanks changed(before, Poisoned(), make_);
  Ok(changed, kBefore, CreateCacheCommand{Spec(before > 1 ? 1 : 0)});
  Append(changed, kBefore, 0, kTokens, false, {{kSequence, 0, PagesFor(before, 5)}});
  Change(changed, before, after, stride);

  ThreadRanks native(after, Poisoned(), make_);
  Ok(native, kAfter, CreateCacheCommand{Spec(stride)});
  Append(native, kAfter, 0, kTokens, false, {{kSequence, 0, PagesFor(after, 3)}});

  for (int rank = 0; rank < after; ++rank) {
    const Holdings held = changed.executor(rank).Report();
    ASSERT_EQ(held.caches.size(), 1u) << "the old shards are dropped";
    EXPECT_EQ(held.caches.front().id, kAfter);
    EXPECT_EQ(changed.executor(rank).memory_used(), native.executor(rank).memory_used());
  }
  EXPECT_EQ(Look(changed, kAfter, kTokens), Look(native, kAfter, kTokens));
  // The same tokens once more are compared with what is stored, bit for bit.
  Append(changed, kAfter, 0, kTokens, true);
  // And it goes on.
  Append(changed, kAfter, kTokens, 10, false);
  Append(native, kAfter, kTokens, 10, false);
  EXPECT_EQ(Look(changed, kAfter, kTokens + 10), Look(native, kAfter, kTokens + 10));
}

TEST_P(RedealRanksTest, ReplicasAreThereToo) {
  const auto [before, after] = std::get<0>(GetParam());
  if (after == 1) GTEST_SKIP() << "one rank has nobody to keep its tokens";
  ThreadRanks ranks(before, Poisoned(), make_);
  Ok(ranks, kBefore, CreateCacheCommand{Spec(0)});
  Append(ranks, kBefore, 0, kTokens, false, {{kSequence, 0, PagesFor(before, 5)}});
  Change(ranks, before, after, 1);
  const std::vector<float> whole = Look(ranks, kAfter, kTokens);
  for (int rank = 0; rank < after; ++rank) {
    ranks.Replace(rank, Poisoned());
    Ok(ranks, kAfter, CreateCacheCommand{Spec(1), /*existing=*/true});
    const std::vector<int32_t> pages = PagesFor(after, 3);
    Ok(ranks, kAfter, SetTablesCommand{{{kSequence, 0, pages}}});
    Ok(ranks, kAfter, TransferPagesCommand{.rank = rank, .restore = true, .pages = pages});
    Ok(ranks, kAfter,
       TransferPagesCommand{.rank = WardOf(rank, 1, after), .restore = false, .pages = pages});
    EXPECT_EQ(Look(ranks, kAfter, kTokens), whole) << "rank " << rank;
  }
}

std::string NameOf(const ::testing::TestParamInfo<RedealRanksTest::ParamType>& test) {
  const std::pair<int, int> ranks = std::get<0>(test.param);
  return std::to_string(ranks.first) + "_to_" + std::to_string(ranks.second) + "_shape_" +
         std::to_string(std::get<1>(test.param)) + "_" + Name(std::get<2>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Ranks, RedealRanksTest,
                         ::testing::Combine(::testing::Values(std::pair(2, 4), std::pair(4, 2),
                                                              std::pair(3, 1), std::pair(1, 3),
                                                              std::pair(2, 3)),
                                            ::testing::Range(0, 5),
                                            ::testing::Values(Device::kCpu, Device::kCuda)),
                         NameOf);

// A change that ends half-way: the group forms as it was, and what was made meanwhile is dropped.
TEST(Redeal, AGroupFormsAgainAsItWas) {
  CacheSpec spec = SmallSpec();
  ThreadRanks ranks(2, Poisoned());
  uint64_t number = 0;
  const auto ok = [&](CacheId cache, decltype(Command::body) body) {
    for (const auto& [rank, reply] :
         ranks.Execute(CommandOf(ranks.epoch(), ++number, cache, std::move(body)))) {
      EXPECT_TRUE(reply.status.ok()) << "rank " << rank << ": " << reply.status;
    }
  };
  ok(1, CreateCacheCommand{spec});
  const size_t before = ranks.executor(0).memory_used();
  ranks.Resize(3, Poisoned(), 2);
  ok(2, CreateCacheCommand{spec, false, 3});
  EXPECT_GT(ranks.executor(0).memory_used(), before);
  EXPECT_GT(ranks.executor(2).memory_used(), 0u);
  ranks.Resize(2, Poisoned(), 2);
  EXPECT_EQ(ranks.executor(0).memory_used(), before);
  EXPECT_EQ(ranks.executor(1).Report().caches.front().id, 1u);
}

// Ranks that a cache is not dealt over hold nothing of it, and take no offence at commands about
// it.
TEST(Redeal, RanksBeyondTheCachesHoldNothing) {
  CacheSpec spec = SmallSpec();
  ThreadRanks ranks(3, Poisoned());
  uint64_t number = 0;
  const auto run = [&](decltype(Command::body) body) {
    return ranks.Execute(CommandOf(ranks.epoch(), ++number, 2, std::move(body)));
  };
  for (const auto& [rank, reply] : run(CreateCacheCommand{spec, false, 2})) {
    EXPECT_TRUE(reply.status.ok()) << reply.status;
  }
  EXPECT_EQ(ranks.executor(2).memory_used(), 0u);
  for (const auto& [rank, reply] : run(SetTablesCommand{{{1, 0, {4}}}})) {
    EXPECT_TRUE(reply.status.ok()) << reply.status;
  }
  EXPECT_EQ(run(CreateCacheCommand{spec, false, 4}).at(0).status.code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tributary::worker::testing
