// Ranks that keep the pages of others: what a rank that was replaced gets back is what was there,
// to the bit.
#include "worker/replica.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/status/errors.h"
#include "tests/worker/devices.h"
#include "tests/worker/ranks.h"
#include "tests/worker/specs.h"

namespace tributary::worker::testing {
namespace {

using ::testing::HasSubstr;

TEST(ReplicaStride, PutsKeepersOnOtherHosts) {
  EXPECT_EQ(ReplicaStride({"a"}), 0);
  EXPECT_EQ(ReplicaStride({"a", "a", "a"}), 1);
  EXPECT_EQ(ReplicaStride({"a", "b", "c", "d"}), 1);
  EXPECT_EQ(ReplicaStride({"a", "a", "b", "b"}), 2);
  EXPECT_EQ(ReplicaStride({"a", "a", "a", "b", "b", "b"}), 3);
  EXPECT_EQ(KeeperOf(WardOf(1, 3, 8), 3, 8), 1);
}

TEST(Parcel, ShowsThatAPageHasChanged) {
  const std::vector<int32_t> pages = {4, 9};
  std::vector<std::byte> parcel(ParcelBytes(2, 100), std::byte{7});
  SealParcel(2, 100, parcel.data());
  EXPECT_TRUE(CheckParcel(pages, 100, parcel.data()).ok());
  parcel[150] = std::byte{6};
  const absl::Status changed = CheckParcel(pages, 100, parcel.data());
  EXPECT_EQ(changed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(changed.message()), HasSubstr("page 9"));
}

TEST(Parcel, PagesOfAnotherOrderAreRefused) {
  const std::vector<int32_t> pages = {4, 9};
  std::vector<std::byte> parcel(ParcelBytes(2, 100), std::byte{7});
  SealParcel(2, 100, parcel.data(), /*order=*/0);
  EXPECT_FALSE(CheckParcel(pages, 100, parcel.data(), /*order=*/1).ok());

  CacheSpec spec;
  spec.layers.resize(2);
  spec.kv_dtype = DType::kBf16;
  EXPECT_EQ(PageOrderOf(spec), 0u);
  spec.layers[1].kv_dtype = DType::kNvfp4;
  EXPECT_EQ(PageOrderOf(spec), 1u);
}

constexpr CacheId kCacheId = 3;
constexpr int kRanks = 3;
constexpr int32_t kTokens = 150;
const std::vector<int32_t> kPages = {5, 2, 7, 1};

// What the ranks compute on, and the type of the cache's elements.
struct Kind {
  Device device = Device::kCpu;
  DType type = DType::kBf16;
};

class ReplicaTest : public ::testing::TestWithParam<Kind> {
 protected:
  explicit ReplicaTest(int32_t stride = 1) : spec_(SmallSpec()), values_(1 << 18) {
    spec_.replica_stride = stride;
    spec_.num_pages = 16;
    spec_.kv_dtype = GetParam().type;
    spec_.layers.resize(2);
    spec_.layers[1].k_scale = ScalesFor(spec_.kv_heads, 0.02f);
    spec_.layers[1].v_scale = {0.03f};
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& value : values_) value = normal(random);
  }
  void SetUp() override {
    const Device device = GetParam().device;
    if (const std::string reason = WhyNoDevice(device); !reason.empty()) GTEST_SKIP() << reason;
    group_ = std::make_unique<ThreadRanks>(kRanks, Options(), BackendsOn(device));
    Ok(CreateCacheCommand{spec_});
    Append(0, kTokens, {{1, 0, kPages}});
  }

  // Of one of the types, parcels go over the communicator, as between machines.
  static ExecutorOptions Options() {
    ExecutorOptions options = Poisoned();
    if (GetParam().type == DType::kBf16) options.least_lane_bytes = SIZE_MAX;
    return options;
  }
  ThreadRanks& ranks() { return *group_; }
  std::map<int, Reply> Execute(decltype(Command::body) body) {
    return ranks().Execute(CommandOf(ranks().epoch(), ++number_, kCacheId, std::move(body)));
  }
  void Ok(decltype(Command::body) body) {
    for (const auto& [rank, reply] : Execute(std::move(body))) {
      EXPECT_TRUE(reply.status.ok()) << "rank " << rank << ": " << reply.status;
    }
  }
  TensorView Values(size_t begin, int32_t rows, int32_t heads) const {
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(heads * spec_.head_dim);
    EXPECT_LE(begin + count, values_.size());
    return {reinterpret_cast<const std::byte*>(values_.data() + begin), DType::kF32, count * 4, {}};
  }
  void Append(int64_t first, int32_t tokens, std::vector<PageUpdate> updates = {}) {
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
      StepCommand step{.layer = layer, .kind = StepKind::kAppend};
      if (layer == 0) step.page_updates = updates;
      step.entries = {{1, first, 0, tokens, false}};
      step.k = Values(static_cast<size_t>(first) * 64, tokens, spec_.kv_heads);
      step.v = Values(1000 + static_cast<size_t>(first) * 64, tokens, spec_.kv_heads);
      Ok(step);
    }
  }
  // What a query over everything sees.
  std::vector<float> Look(int64_t length = kTokens) {
    std::vector<float> seen;
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
      StepCommand step{.layer = layer, .kind = StepKind::kDecode};
      step.entries = {{1, length - 1, 1, 0, false}};
      step.q = Values(5, 1, spec_.q_heads);
      const std::map<int, Reply> replies = Execute(step);
      EXPECT_TRUE(replies.at(0).status.ok()) << replies.at(0).status;
      const Reply& root = replies.at(0);
      seen.insert(seen.end(), root.o.begin(), root.o.end());
      seen.insert(seen.end(), root.lse.begin(), root.lse.end());
    }
    return seen;
  }
  // A rank is lost, and another takes its place, which knows the tables and no more.
  void Replace(int rank) {
    ranks().Replace(rank, Options());
    Ok(CreateCacheCommand{spec_, /*existing=*/true});
    Ok(SetTablesCommand{{{1, 0, kPages}}});
  }
  HeldCache HeldBy(int rank) { return ranks().executor(rank).Report().caches.at(0); }

  std::unique_ptr<ThreadRanks> group_;
  CacheSpec spec_;
  std::vector<float> values_;
  uint64_t number_ = 0;
};

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  return std::string(Name(info.param.device)) + "_" + Name(info.param.type);
}
constexpr Kind kKinds[] = {{Device::kCpu, DType::kBf16},     {Device::kCpu, DType::kNvfp4},
                           {Device::kCpu, DType::kF32},      {Device::kCuda, DType::kBf16},
                           {Device::kCuda, DType::kF16},     {Device::kCuda, DType::kFp8E4M3},
                           {Device::kCuda, DType::kFp8E5M2}, {Device::kCuda, DType::kNvfp4}};
INSTANTIATE_TEST_SUITE_P(Kinds, ReplicaTest, ::testing::ValuesIn(kKinds), KindName);

TEST_P(ReplicaTest, AReplacedRankGetsItsPagesBackToTheBit) {
  const std::vector<float> before = Look();
  for (int rank = 0; rank < kRanks; ++rank) {
    Replace(rank);
    EXPECT_TRUE(HeldBy(rank).lacks_pages);
    EXPECT_TRUE(HeldBy(rank).replica_lacks_pages);
    Ok(TransferPagesCommand{.rank = rank, .restore = true, .pages = {5, 2}});
    Ok(TransferPagesCommand{.rank = rank, .restore = true, .pages = {7, 1}});
    Ok(TransferPagesCommand{.rank = rank, .restore = true, .pages = {}, .complete = true});
    EXPECT_FALSE(HeldBy(rank).lacks_pages);
    EXPECT_TRUE(HeldBy(rank).replica_lacks_pages);
    EXPECT_EQ(Look(), before) << "rank " << rank;
    // And its keeper's part: the next rank to go is one whose pages it keeps, or who keeps its own.
    const int ward = WardOf(rank, 1, kRanks);
    Ok(TransferPagesCommand{.rank = ward, .restore = false, .pages = kPages});
    Ok(TransferPagesCommand{.rank = ward, .restore = false, .pages = {}, .complete = true});
    EXPECT_FALSE(HeldBy(rank).replica_lacks_pages);
  }
}

TEST_P(ReplicaTest, StepsThatComeMeanwhileAreKept) {
  Replace(1);
  Ok(TransferPagesCommand{.rank = 1, .restore = true, .pages = kPages});
  Ok(TransferPagesCommand{.rank = 0, .restore = false, .pages = kPages});
  Append(kTokens, 20);
  // A page is copied, on replicas too, and written to.
  for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
    StepCommand step{.layer = layer, .kind = StepKind::kAppend};
    if (layer == 0) {
      step.page_copies = {{1, 9}};
      step.page_updates = {{1, 3, {9}}};
    }
    step.entries = {{1, kTokens + 20, 0, 2, false}};
    step.k = Values(77, 2, spec_.kv_heads);
    step.v = Values(99, 2, spec_.kv_heads);
    Ok(step);
  }
  const std::vector<float> before = Look(kTokens + 22);
  const std::vector<int32_t> pages = {5, 2, 7, 9};
  for (int rank = 0; rank < kRanks; ++rank) {
    Replace(rank);
    Ok(SetTablesCommand{{{1, 0, pages}}});
    Ok(TransferPagesCommand{.rank = rank, .restore = true, .pages = pages});
    EXPECT_EQ(Look(kTokens + 22), before) << "rank " << rank;
    Ok(TransferPagesCommand{.rank = WardOf(rank, 1, kRanks), .restore = false, .pages = pages});
  }
}

// A call in several steps of which the first is carried out and then no other: its tokens lie
// behind what the sequence holds, on the ward and on its keeper, until others take their place.
TEST_P(ReplicaTest, TokensOfACallThatIsNotFinishedAreReplacedInReplicasToo) {
  for (const size_t values : {size_t{3000}, size_t{9000}}) {
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
      StepCommand step{.layer = layer, .kind = StepKind::kAppend};
      const bool whole = values == 9000;
      const int32_t tokens = whole ? 35 : 20;
      step.entries = {{1, kTokens, 0, tokens, false, /*more_follows=*/!whole}};
      step.k = Values(values, tokens, spec_.kv_heads);
      step.v = Values(values + 1000, tokens, spec_.kv_heads);
      Ok(step);
    }
  }
  const std::vector<float> before = Look(kTokens + 35);
  for (int rank = 0; rank < kRanks; ++rank) {
    Replace(rank);
    Ok(TransferPagesCommand{.rank = rank, .restore = true, .pages = kPages});
    EXPECT_EQ(Look(kTokens + 35), before) << "rank " << rank;
    Ok(TransferPagesCommand{.rank = WardOf(rank, 1, kRanks), .restore = false, .pages = kPages});
  }
}

// Tokens of a lost shard that a host brings again: several ranges in one step, and not twice.
TEST_P(ReplicaTest, TokensThatAreBroughtBackGiveTheSameBytes) {
  const std::vector<float> before = Look();
  Replace(0);
  Replace(1);  // who kept the pages of rank 0
  for (int32_t layer = 0; layer < static_cast<int32_t>(spec_.layers.size()); ++layer) {
    StepCommand step{.layer = layer, .kind = StepKind::kAppend};
    // All of the sequence: what is left is compared.
    for (int64_t first = 0; first < kTokens; first += 50) {
      StepEntry entry{.sequence = 1, .first_position = first, .new_tokens = 50};
      entry.brings_back = true;
      step.entries.push_back(entry);
    }
    step.k = Values(0, kTokens, spec_.kv_heads);
    step.v = Values(1000, kTokens, spec_.kv_heads);
    Ok(step);
    std::swap(step.entries[0], step.entries[1]);
    for (const auto& [rank, reply] : Execute(step)) {
      EXPECT_EQ(FieldOf(reply.status), "entries[1].sequence") << reply.status;
    }
  }
  EXPECT_EQ(Look(), before);
}

TEST_P(ReplicaTest, TransfersOfWhatIsNotThereAreRefusedByAll) {
  const auto refused = [&](const TransferPagesCommand& transfer) {
    std::string field;
    for (const auto& [rank, reply] : Execute(transfer)) {
      EXPECT_EQ(reply.status.code(), absl::StatusCode::kInvalidArgument) << rank;
      field = FieldOf(reply.status);
    }
    return field;
  };
  EXPECT_EQ(refused({.rank = 3, .restore = true, .pages = {1}}), "transfer.rank");
  EXPECT_EQ(refused({.rank = 0, .restore = true, .pages = {16}}), "transfer.pages");
  EXPECT_FALSE(Look().empty()) << "the group goes on";
}

TEST(ReplicaMemory, CountsTowardsTheLimitOfTheRank) {
  CacheSpec spec = SmallSpec();
  spec.replica_stride = 1;
  ExecutorOptions options;
  options.memory_limit = *ShardBytes(spec) * 3 / 2;
  ThreadRanks ranks(2, options);
  Command command;
  command.epoch = ranks.epoch();
  command.number = 1;
  command.cache = kCacheId;
  command.body = CreateCacheCommand{spec};
  for (const auto& [rank, reply] : ranks.Execute(command)) {
    EXPECT_EQ(reply.status.code(), absl::StatusCode::kResourceExhausted) << reply.status;
    EXPECT_EQ(ranks.executor(rank).memory_used(), 0u);
  }
}

// Without replicas: who is about to leave hands over first.
class HandOverTest : public ReplicaTest {
 protected:
  HandOverTest() : ReplicaTest(0) {}
};
INSTANTIATE_TEST_SUITE_P(Kinds, HandOverTest, ::testing::ValuesIn(kKinds), KindName);

TEST_P(HandOverTest, TheNextRankKeepsThePagesUntilTheyAreRestored) {
  const size_t memory = ranks().executor(2).memory_used();
  const TransferPagesCommand begin{.rank = 1, .restore = false, .pages = {}};
  for (bool more = true; more;) more = Execute(begin).at(2).more_memory;
  EXPECT_EQ(ranks().executor(2).memory_used(), 2 * memory);
  EXPECT_EQ(ranks().executor(0).memory_used(), memory);
  Append(kTokens, 20);
  const std::vector<float> before = Look(kTokens + 20);
  Ok(TransferPagesCommand{.rank = 1, .restore = false, .pages = kPages});
  Replace(1);
  Ok(TransferPagesCommand{.rank = 1, .restore = true, .pages = kPages});
  Ok(TransferPagesCommand{.rank = 1, .restore = true, .pages = {}, .complete = true});
  EXPECT_EQ(Look(kTokens + 20), before);
  EXPECT_EQ(ranks().executor(2).memory_used(), memory);
}

TEST_P(HandOverTest, PagesThatNobodyKeepsBreakTheGroup) {
  const auto replies = Execute(TransferPagesCommand{.rank = 1, .restore = true, .pages = kPages});
  EXPECT_EQ(replies.at(2).status.code(), absl::StatusCode::kInternal) << replies.at(2).status;
  EXPECT_FALSE(replies.at(1).status.ok());
}

}  // namespace
}  // namespace tributary::worker::testing
