// Sequences over another number of ranks: each token lies where the other group has it, whatever
// was forked, cut, given up or written since.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/key_range.h"
#include "service/schedule/sequence_table.h"
#include "worker/redeal.h"

namespace tributary::service {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kPageSize = 16;

TableGeometry GeometryFor(int ranks, int64_t capacity, int32_t interleave, int64_t window = -1) {
  const int64_t page_tokens = int64_t{kPageSize} * ranks;
  TableGeometry geometry{.layers = 2,
                         .ranks = ranks,
                         .page_size = kPageSize,
                         .interleave = interleave,
                         .pages = static_cast<int32_t>((capacity + page_tokens - 1) / page_tokens),
                         .max_sequences = 64,
                         .name = "c",
                         .first_id = static_cast<worker::CacheId>(10 * ranks)};
  if (window >= 0) {
    geometry.window_left = {-1, window};
    geometry.rollback_tokens = 8;
    geometry.window_pages = geometry.pages;
  }
  return geometry;
}

// A table, and what lies in the pages that it gives out: a number for each token that was written.
class Model {
 public:
  using Pages = std::map<std::tuple<int32_t, int32_t, int64_t>, int64_t>;  // group, rank, slot

  explicit Model(const TableGeometry& geometry)
      : table_(std::make_unique<SequenceTable>(geometry)) {}

  SequenceTable& table() { return *table_; }

  void Open(SequenceId id) {
    bool reopened = false;
    ASSERT_TRUE(table_->Open(id, &reopened).ok());
    tokens_[id].clear();
  }
  // False: there are no pages for them.
  bool Append(SequenceId id, int32_t count) {
    std::vector<int64_t>& tokens = tokens_[id];
    const auto first = static_cast<int64_t>(tokens.size());
    std::vector<int64_t> written;
    for (int32_t i = 0; i < count; ++i) written.push_back(++last_token_);
    for (int32_t layer = 0; layer < 2; ++layer) {
      const auto step = table_->Reserve(
          layer, worker::StepKind::kAppend,
          {{.sequence = id, .first_position = first, .query_rows = 0, .new_tokens = count}});
      if (!step.ok()) {
        EXPECT_EQ(step.status().code(), absl::StatusCode::kResourceExhausted) << step.status();
        EXPECT_TRUE(table_->Truncate(id, first).ok());
        return false;
      }
      for (const worker::PageCopy& copy : step->page_copies) CopyPage(step->group, copy);
      table_->Commit(*step);
      // Layers of one group have the same tokens.
      for (int32_t i = 0; i < count; ++i) {
        At(step->group, id, first + i) = written[static_cast<size_t>(i)];
      }
    }
    tokens.insert(tokens.end(), written.begin(), written.end());
    return true;
  }
  void Fork(SequenceId parent, SequenceId child, int64_t length) {
    const auto forked = table_->Fork(parent, child, length);
    if (!forked.ok()) {  // before what windows keep
      EXPECT_EQ(forked.status().code(), absl::StatusCode::kOutOfRange) << forked.status();
      return;
    }
    tokens_[child].assign(tokens_[parent].begin(), tokens_[parent].begin() + length);
  }
  void Truncate(SequenceId id, int64_t length) {
    if (table_->Truncate(id, length).ok()) tokens_[id].resize(static_cast<size_t>(length));
  }
  void Close(SequenceId id) {
    EXPECT_TRUE(table_->Close(id).ok());
    tokens_.erase(id);
  }

  // Every token that may be looked at lies where it should.
  void Check() {
    for (const auto& [id, tokens] : tokens_) {
      const Sequence& sequence = *table_->Find(id);
      for (int32_t group = 0; group < table_->groups().size(); ++group) {
        const int64_t kept = table_->FirstKept(group, sequence);
        for (int64_t t = kept; t < static_cast<int64_t>(tokens.size()); ++t) {
          ASSERT_EQ(At(group, id, t), tokens[static_cast<size_t>(t)])
              << "sequence " << id << ", token " << t << ", group " << group;
        }
      }
    }
  }

  // The same sequences over other ranks.
  absl::StatusOr<Model> Redealt(const TableGeometry& geometry) {
    Model after(geometry);
    const auto moved = table_->RedealInto(after.table_.get());
    if (!moved.ok()) return moved.status();
    const worker::RankChange ranks{table_->geometry().ranks, geometry.ranks};
    const int32_t interleave = geometry.interleave;
    for (size_t group = 0; group < moved->size(); ++group) {
      const auto g = static_cast<int32_t>(group);
      for (const worker::MovedPage& page : (*moved)[group]) {
        for (const worker::RunMove& run : worker::RunsOf(ranks, kPageSize, interleave, page)) {
          for (int32_t i = 0; i < interleave; ++i) {
            const auto found = pages_.find({g, run.from_rank, run.from_slot + i});
            if (found == pages_.end()) continue;
            after.pages_[{g, run.to_rank, run.to_slot + i}] = found->second;
          }
        }
      }
    }
    after.tokens_ = tokens_;
    after.last_token_ = last_token_;
    return after;
  }

  std::map<SequenceId, std::vector<int64_t>>& tokens() { return tokens_; }

 private:
  int64_t& At(int32_t group, SequenceId id, int64_t token) {
    const TableGeometry& geometry = table_->geometry();
    const DcpLayout layout{0, geometry.ranks, geometry.interleave};
    const int64_t slot = LocalSlot(layout, token);
    const std::vector<int32_t>& pages = table_->Find(id)->groups[group].pages;
    const int32_t page = pages.at(static_cast<size_t>(slot / kPageSize));
    return pages_[{group, OwnerOf(layout, token), int64_t{page} * kPageSize + slot % kPageSize}];
  }
  void CopyPage(int32_t group, const worker::PageCopy& copy) {
    for (int32_t rank = 0; rank < table_->geometry().ranks; ++rank) {
      for (int64_t slot = 0; slot < kPageSize; ++slot) {
        pages_[{group, rank, int64_t{copy.destination} * kPageSize + slot}] =
            pages_[{group, rank, int64_t{copy.source} * kPageSize + slot}];
      }
    }
  }

  std::unique_ptr<SequenceTable> table_;
  Pages pages_;
  std::map<SequenceId, std::vector<int64_t>> tokens_;
  int64_t last_token_ = 0;
};

void DoSomething(Model& model, std::mt19937& random, SequenceId* next) {
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  auto& tokens = model.tokens();
  if (tokens.size() < 2) {
    model.Open(*next);
    model.Append((*next)++, static_cast<int32_t>(draw(1, 100)));
    return;
  }
  auto at = tokens.begin();
  std::advance(at, draw(0, static_cast<int64_t>(tokens.size()) - 1));
  const SequenceId id = at->first;
  const auto length = static_cast<int64_t>(at->second.size());
  const int64_t dice = draw(1, 10);
  if (dice <= 5) {
    model.Append(id, static_cast<int32_t>(draw(1, 40)));
  } else if (dice <= 8 && length > 0 && tokens.size() < 12) {
    model.Fork(id, (*next)++, draw(1, length));
  } else if (dice == 9 && length > 0) {
    model.Truncate(id, draw(1, length));
  } else if (tokens.size() > 8) {
    model.Close(id);
  }
}

// [interleave, window]
class RedealingTest : public ::testing::TestWithParam<std::tuple<int32_t, int64_t>> {};

TEST_P(RedealingTest, EveryTokenIsWhereItShouldBe) {
  const auto [interleave, window] = GetParam();
  constexpr int64_t kCapacity = 8'192;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    SequenceId next = 1;
    int ranks = 1 + static_cast<int>(seed % 4);
    Model model(GeometryFor(ranks, kCapacity, interleave, window));
    for (int change = 0; change < 4; ++change) {
      for (int i = 0; i < 60; ++i) DoSomething(model, random, &next);
      ASSERT_NO_FATAL_FAILURE(model.Check()) << "seed " << seed;
      ranks = 1 + (ranks + 1 + static_cast<int>(seed) % 2) % 5;
      auto after = model.Redealt(GeometryFor(ranks, kCapacity, interleave, window));
      ASSERT_TRUE(after.ok()) << after.status();
      model = *std::move(after);
      ASSERT_NO_FATAL_FAILURE(model.Check()) << "seed " << seed << ", " << ranks << " ranks";
    }
    std::vector<SequenceId> all;
    for (const auto& [id, tokens] : model.tokens()) all.push_back(id);
    for (const SequenceId id : all) model.Close(id);
    for (int32_t group = 0; group < model.table().groups().size(); ++group) {
      EXPECT_EQ(model.table().pages(group).used(), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RedealingTest,
                         ::testing::Combine(::testing::Values(4, 16), ::testing::Values(-1, 40)));

TEST(Redealing, WhatForksShareTheyShareAfterwards) {
  Model model(GeometryFor(2, 4'096, 16));
  model.Open(1);
  model.Append(1, 320);
  model.Fork(1, 2, 320);
  model.Fork(1, 3, 128);
  model.Append(2, 5);
  EXPECT_EQ(model.table().pages().used(), 11);
  auto after = model.Redealt(GeometryFor(4, 4'096, 16));
  ASSERT_TRUE(after.ok()) << after.status();
  after->Check();
  // Five of the first, one more for the second's own tokens, which begin with a page.
  EXPECT_EQ(after->table().pages().used(), 6);
  EXPECT_EQ(after->table().Find(3)->groups[0].pages[0], after->table().Find(1)->groups[0].pages[0]);
}

TEST(Redealing, LengthsLeasesAndParentsStay) {
  Model model(GeometryFor(4, 4'096, 16));
  model.Open(1);
  model.Append(1, 70);
  model.Fork(1, 2, 33);
  auto after = model.Redealt(GeometryFor(3, 4'096, 16));
  ASSERT_TRUE(after.ok());
  const Sequence& fork = *after->table().Find(2);
  EXPECT_EQ(LeastLength(fork), 33);
  EXPECT_EQ(fork.parent, 1u);
  EXPECT_EQ(fork.fork_length, 33);
  // A repeated fork is recognised.
  EXPECT_TRUE(after->table().Fork(1, 2, 33).ok());
}

TEST(Redealing, IsRefusedWhereThePagesDoNotSuffice) {
  // Short sequences take a page each, and pages of more ranks are larger.
  Model model(GeometryFor(1, 16 * 20, 16));
  for (SequenceId id = 1; id <= 20; ++id) {
    model.Open(id);
    ASSERT_TRUE(model.Append(id, 10));
  }
  const auto after = model.Redealt(GeometryFor(2, 16 * 20, 16));
  EXPECT_EQ(after.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(after.status().message()), HasSubstr("take 20 pages of 2 workers"));
  model.Check();
}

TEST(Redealing, WaitsForCallsAndIsRefusedWhereTokensAreLost) {
  Model model(GeometryFor(2, 4'096, 16));
  model.Open(1);
  model.Append(1, 70);
  const auto step = model.table().Reserve(
      0, worker::StepKind::kAppend,
      {{.sequence = 1, .first_position = 70, .query_rows = 0, .new_tokens = 100}});
  ASSERT_TRUE(step.ok());
  EXPECT_EQ(model.table().CheckMayRedeal().code(), absl::StatusCode::kUnavailable);
  model.table().Rollback(*step);
  EXPECT_TRUE(model.table().CheckMayRedeal().ok());
  model.table().MarkLostOn({true, false});
  EXPECT_EQ(model.table().CheckMayRedeal().code(), absl::StatusCode::kFailedPrecondition);
  // One of which nothing is left is taken along, and stays lost.
  model.table().MarkLostOn({true, true});
  model.tokens().clear();
  auto after = model.Redealt(GeometryFor(3, 4'096, 16));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->table().lost(), 1);
}

TEST(Redealing, OwnersPayForTheNewPages) {
  ClientLimits limits;
  limits.pages = 100;
  limits.sequences = 10;
  ClientQuota quota(&limits, nullptr);
  SequenceTable before(GeometryFor(2, 4'096, 16)), after(GeometryFor(4, 4'096, 16));
  bool reopened = false;
  ASSERT_TRUE(before.Open(1, &reopened, quota.Of("a")).ok());
  for (int32_t layer = 0; layer < 2; ++layer) {
    const auto step =
        before.Reserve(layer, worker::StepKind::kAppend,
                       {{.sequence = 1, .first_position = 0, .query_rows = 0, .new_tokens = 256}});
    ASSERT_TRUE(step.ok());
    before.Commit(*step);
  }
  EXPECT_EQ(quota.Of("a")->pages(), 8);
  ASSERT_TRUE(before.RedealInto(&after).ok());
  EXPECT_EQ(quota.Of("a")->pages(), 8) << "nothing counts yet";
  after.TakeOwners(&before);
  EXPECT_EQ(quota.Of("a")->pages(), 4);
  EXPECT_EQ(quota.Of("a")->sequences(), 1);
  ASSERT_TRUE(after.Close(1).ok());
  EXPECT_EQ(quota.Of("a")->pages(), 0);
  EXPECT_EQ(quota.Of("a")->sequences(), 0);
}

}  // namespace
}  // namespace tributary::service
