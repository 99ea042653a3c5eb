// Pages that sequences share, read once for all of them: the same bits as if each sequence had read
// them for itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "kernels/cpu/tiling.h"
#include "tests/kernels/attention_case.h"
#include "tests/kernels/dispatch.h"
#include "tests/support/compare.h"

namespace tributary::test {
namespace {

using ::testing::HasSubstr;

// Runs of shared slots, in units of kSharedSlots.
struct Run {
  int64_t begin, end;
  std::vector<int32_t> entries;
};

// A case in which the first of each run's entries lends its pages to the others.
class SharedCase {
 public:
  SharedCase(const AttentionShape& shape, const std::vector<std::vector<KeyRange>>& sequences,
             const std::vector<Run>& runs)
      : case_(shape, sequences) {
    for (size_t s = 0; s < sequences.size(); ++s) {
      tables_.emplace_back(case_.pages(s).begin(), case_.pages(s).end());
    }
    const int64_t unit = kSharedSlots / shape.page_size;
    for (const Run& run : runs) {
      shared_.push_back({{run.begin * kSharedSlots, run.end * kSharedSlots}, run.entries});
      const std::vector<int32_t>& from = tables_[run.entries[0]];
      for (const int32_t entry : run.entries) {
        for (int64_t page = run.begin * unit; page < run.end * unit; ++page) {
          if (page + 1 >= std::ssize(tables_[entry])) break;  // its last is wild
          tables_[entry][page] = from[page];
        }
      }
    }
    Point(tables_);
  }

  AttentionCase& base() { return case_; }
  AttentionParams Apart() {
    AttentionParams p = case_.params();
    p.entries = entries_;
    return p;
  }
  AttentionParams Together() {
    AttentionParams p = Apart();
    p.shared = shared_;
    return p;
  }
  AttentionParams Plain() {
    AttentionParams p = case_.plain_params();
    p.entries = entries_;
    return p;
  }
  // From now on the runs' pages stand in the longest table of their entries alone; in the others
  // stand pages of something else.
  void ForgetPagesOfOthers() {
    forgotten_ = tables_;
    for (const SharedPages& run : shared_) {
      size_t keeper = run.entries[0];
      for (const int32_t entry : run.entries) {
        if (tables_[entry].size() > tables_[keeper].size()) keeper = entry;
      }
      for (const int32_t entry : run.entries) {
        if (size_t(entry) == keeper) continue;
        const int64_t begin = run.slots.lo / case_.params().kv.page_size;
        const int64_t end = run.slots.hi / case_.params().kv.page_size;
        for (int64_t page = begin; page < end && page + 1 < std::ssize(forgotten_[entry]); ++page) {
          forgotten_[entry][page] = tables_.back()[0];
        }
      }
    }
    Point(forgotten_);
  }

 private:
  void Point(const std::vector<std::vector<int32_t>>& tables) {
    entries_.assign(case_.params().entries.begin(), case_.params().entries.end());
    for (size_t i = 0; i < entries_.size(); ++i) entries_[i].pages = tables[i];
  }

  AttentionCase case_;
  std::vector<std::vector<int32_t>> tables_, forgotten_;
  std::vector<AttentionEntry> entries_;
  std::vector<SharedPages> shared_;
};

class SharedPagesTest : public ::testing::TestWithParam<int64_t> {
 protected:
  struct Bits {
    std::vector<float> o, lse;
    bool operator==(const Bits& other) const {
      return std::memcmp(o.data(), other.o.data(), o.size() * sizeof(float)) == 0 &&
             std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
    }
  };
  static Bits Run(SharedCase& c, const AttentionParams& p, cpu::ThreadPool& pool) {
    Poison(std::span(c.base().o));
    Poison(std::span(c.base().lse));
    const Status status = cpu::Attention(p, pool);
    EXPECT_TRUE(status.ok()) << status.message();
    return {c.base().o, c.base().lse};
  }
  void ExpectSame(SharedCase& c) {
    const Bits apart = Run(c, c.Apart(), pool_);
    const ReferenceResult expected = ReferenceAttention(c.Plain());
    EXPECT_TRUE(AllClose(apart.lse, expected.lse, kAttentionTolerance, c.base().lse_shape()));
    EXPECT_EQ(Run(c, c.Together(), pool_), apart);
    cpu::ThreadPool alone(1);
    EXPECT_EQ(Run(c, c.Together(), alone), apart);
    c.ForgetPagesOfOthers();
    EXPECT_EQ(Run(c, c.Together(), pool_), apart) << "pages of a run are read by one table";
    EXPECT_FALSE(Run(c, c.Apart(), pool_) == apart) << "the others' tables do not have them";
  }

  ForcedTarget target_{GetParam()};
  cpu::ThreadPool pool_{3};
};
INSTANTIATE_TEST_SUITE_P(Targets, SharedPagesTest, ::testing::ValuesIn(Targets()), TargetName);

// A stranger last, whose pages stand in for what is forgotten.
const std::vector<KeyRange> kStranger = CausalRows(70, 1);

TEST_P(SharedPagesTest, EveryTypeAndGroup) {
  for (const DType kv : {DType::kBf16, DType::kF16, DType::kFp8E4M3}) {
    for (const int32_t group : {1, 4, 5}) {
      AttentionShape shape;
      shape.kv_dtype = kv;
      shape.group = group;
      shape.scaled = group == 4;
      shape.page_size = group == 5 ? 64 : 16;
      SharedCase c(shape,
                   {CausalRows(1500, 1), CausalRows(2300, 3), CausalRows(1024, 1), kStranger},
                   {{0, 1, {0, 1, 2}}});
      ExpectSame(c);
    }
  }
}

TEST_P(SharedPagesTest, ATreeOfThreeLevels) {
  AttentionShape shape;
  shape.kv_dtype = DType::kFp8E4M3;
  SharedCase c(shape,
               {CausalRows(4200, 1), CausalRows(3100, 1), kStranger, CausalRows(4100, 2),
                CausalRows(3080, 1), CausalRows(2049, 1), kStranger},
               {{0, 2, {0, 1, 3, 4, 5}}, {2, 3, {0, 3}}, {2, 3, {1, 4}}, {3, 4, {0, 3}}});
  ExpectSame(c);
}

TEST_P(SharedPagesTest, RowsThatSeePartsOfARunOrNothing) {
  AttentionShape shape;
  shape.page_size = 32;
  SharedCase c(shape,
               {CausalRows(2500, 1),
                CausalRows(1030, 4),
                CausalRows(2048, 2, Window{300, -1}),
                {{0, 0}, {1100, 1900}, {5, 6}},
                kStranger},
               {{0, 1, {0, 1, 2, 3}}, {1, 2, {0, 2, 3}}});
  ExpectSame(c);
}

// Many rows fill blocks of their own: sharing them saves nothing, and what lies behind a run that
// is not shared is not shared either.
TEST_P(SharedPagesTest, WhatIsNotWorthItIsLeft) {
  AttentionShape shape;
  shape.group = 4;  // blocks of 16 rows
  SharedCase c(shape, {CausalRows(2100, 32), CausalRows(2200, 16), kStranger},
               {{0, 1, {0, 1}}, {1, 2, {0, 1}}});
  const Bits apart = Run(c, c.Apart(), pool_);
  EXPECT_EQ(Run(c, c.Together(), pool_), apart);
}

TEST(SharingRuleTest, PagesMustBeReadLessOften) {
  using Rows = std::vector<int32_t>;
  EXPECT_TRUE(cpu::WorthSharing(Rows{1, 1}, 4));
  EXPECT_TRUE(cpu::WorthSharing(Rows{8, 8}, 4));
  EXPECT_FALSE(cpu::WorthSharing(Rows{16, 16}, 4));
  EXPECT_TRUE(cpu::WorthSharing(Rows{17, 15}, 4));
  EXPECT_FALSE(cpu::WorthSharing(Rows{4, 4}, 16));
  EXPECT_TRUE(cpu::WorthSharing(Rows{4, 4, 1, 1}, 16));
  EXPECT_FALSE(cpu::WorthSharing(Rows{0, 3}, 4));
  // What a part of the entries gains, all gain at least.
  for (const int32_t a : {1, 5, 16, 20}) {
    for (const int32_t b : {1, 12, 16, 31}) {
      for (const int32_t c : {1, 7, 32}) {
        if (!cpu::WorthSharing(Rows{a, b}, 4)) continue;
        EXPECT_TRUE(cpu::WorthSharing(Rows{a, b, c}, 4));
      }
    }
  }
}

TEST(SharedPagesCheckTest, RunsThatDoNotFitAreRefused) {
  cpu::ThreadPool pool(1);
  SharedCase c({}, {CausalRows(1500, 1), CausalRows(1500, 1), kStranger}, {{0, 1, {0, 1}}});
  const auto refused = [&](SharedPages run) {
    AttentionParams p = c.Apart();
    p.shared = std::span(&run, 1);
    return std::string(cpu::Attention(p, pool).message());
  };
  EXPECT_THAT(refused({{0, 1000}, {0, 1}}), HasSubstr("shared[0].slots"));
  EXPECT_THAT(refused({{0, 0}, {0, 1}}), HasSubstr("shared[0].slots"));
  EXPECT_THAT(refused({{1024, 2048}, {0, 1}}), HasSubstr("shared[0].slots"));
  EXPECT_THAT(refused({{0, 1024}, {0, 3}}), HasSubstr("shared[0].entries"));
  EXPECT_THAT(refused({{0, 1024}, {-1, 1}}), HasSubstr("shared[0].entries"));
}

}  // namespace
}  // namespace tributary::test
