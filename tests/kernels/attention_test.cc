// The CPU backend's paged attention against the float64 reference, on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/cpu/tiling.h"
#include "kernels/head_dims.h"
#include "tests/kernels/attention_case.h"
#include "tests/kernels/dispatch.h"
#include "tests/support/compare.h"

namespace tributary::test {
namespace {

constexpr DType kCacheTypes[] = {DType::kBf16,    DType::kF16, DType::kFp8E4M3,
                                 DType::kFp8E5M2, DType::kF32, DType::kNvfp4};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using Sequences = std::vector<std::vector<KeyRange>>;

std::string Describe(const AttentionShape& s) {
  return std::string("kv ") + Name(s.kv_dtype) + ", q " + Name(s.q_dtype) + ", head dims " +
         HeadDimsName(s.head_dim, s.ValueDim()) + ", group " + std::to_string(s.group) + ", page " +
         std::to_string(s.page_size) + ", cap " + std::to_string(s.soft_cap);
}

void ExpectMatchesReference(AttentionCase& c, const AttentionShape& shape, cpu::ThreadPool& pool) {
  SCOPED_TRACE(Describe(shape));
  const AttentionParams p = c.params();
  const Status status = cpu::Attention(p, pool);
  ASSERT_TRUE(status.ok()) << status.message();
  const ReferenceResult expected = ReferenceAttention(c.plain_params());
  EXPECT_TRUE(AllClose(c.lse, expected.lse, kAttentionTolerance, c.lse_shape()));
  EXPECT_TRUE(AllClose(c.o, expected.o, AttentionTolerance(p.q_dtype), c.o_shape()));
}

void ExpectMatchesReference(const AttentionShape& shape, const Sequences& sequences,
                            cpu::ThreadPool& pool) {
  AttentionCase c(shape, sequences);
  ExpectMatchesReference(c, shape, pool);
}

class AttentionTest : public ::testing::TestWithParam<int64_t> {
 protected:
  ForcedTarget target_{GetParam()};
  cpu::ThreadPool pool_{2};
};

INSTANTIATE_TEST_SUITE_P(Targets, AttentionTest, ::testing::ValuesIn(Targets()), TargetName);

TEST_P(AttentionTest, EveryHeadDimGroupAndType) {
  for (const HeadDims& dims : kHeadDims) {
    for (const int32_t group : {1, 4, 8, 16}) {
      for (const DType kv_dtype : kCacheTypes) {
        AttentionShape shape;
        shape.head_dim = dims.key_dim;
        shape.value_dim = dims.value_dim;
        shape.group = group;
        shape.kv_dtype = kv_dtype;
        shape.scaled = group == 4;
        ExpectMatchesReference(shape, {CausalRows(150, 1), CausalRows(37, 4)}, pool_);
      }
    }
  }
}

// A page's size decides how many blocks a tile is read from, and so how planes are cut.
TEST_P(AttentionTest, EveryHeadDimAndPageSize) {
  for (const HeadDims& dims : kHeadDims) {
    for (const int32_t page_size : {16, 32, 64, 128}) {
      for (const DType kv_dtype : kCacheTypes) {
        AttentionShape shape;
        shape.head_dim = dims.key_dim;
        shape.value_dim = dims.value_dim;
        shape.page_size = page_size;
        shape.kv_dtype = kv_dtype;
        shape.q_dtype = page_size == 32 ? DType::kF16 : DType::kBf16;
        shape.scaled = page_size == 64;
        ExpectMatchesReference(shape, {CausalRows(200, 1), CausalRows(131, 3, Window{40, -1})},
                               pool_);
      }
    }
  }
}

TEST_P(AttentionTest, OddGroups) {
  for (const int32_t group : {2, 3, 5, 7, 13}) {
    AttentionShape shape;
    shape.group = group;
    ExpectMatchesReference(shape, {CausalRows(70, 1), CausalRows(80, 7)}, pool_);
  }
}

TEST_P(AttentionTest, EveryQueryType) {
  for (const DType q_dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const DType kv_dtype : kCacheTypes) {
      AttentionShape shape;
      shape.q_dtype = q_dtype;
      shape.kv_dtype = kv_dtype;
      shape.q_deviation = 3.0f;
      ExpectMatchesReference(shape, {CausalRows(200, 3)}, pool_);
    }
  }
}

TEST_P(AttentionTest, EveryPageSizeAndLength) {
  constexpr int64_t kTile = cpu::kTileKeys;
  constexpr int64_t kChunk = cpu::kChunkKeys;
  for (const int32_t page_size : {16, 32, 64, 128}) {
    for (const int64_t length :
         {int64_t{1}, int64_t{2}, int64_t{page_size - 1}, int64_t{page_size},
          int64_t{page_size + 1}, kTile - 1, kTile + 1, kChunk - 1, kChunk, kChunk + 1}) {
      AttentionShape shape;
      shape.page_size = page_size;
      shape.kv_heads = 1;
      shape.kv_dtype = DType::kFp8E4M3;
      ExpectMatchesReference(shape, {CausalRows(length, 1)}, pool_);
    }
  }
}

TEST_P(AttentionTest, NoKeysGiveTheIdentity) {
  AttentionShape shape;
  AttentionCase c(shape, {{{0, 0}}, {{5, 5}, {3, 1}, {0, 9}}});
  ExpectMatchesReference(c, shape, pool_);
  for (int32_t row = 0; row < 3; ++row) {
    for (int32_t head = 0; head < c.q_heads(); ++head) {
      const size_t at = size_t(row) * c.q_heads() + head;
      EXPECT_EQ(c.lse[at], -kInf);
      for (int32_t d = 0; d < shape.head_dim; ++d) EXPECT_EQ(c.o[at * shape.head_dim + d], 0.0f);
    }
  }
}

TEST_P(AttentionTest, ManyRows) {
  for (const DType kv_dtype : kCacheTypes) {
    AttentionShape shape;
    shape.kv_heads = 1;
    shape.kv_dtype = kv_dtype;
    if (kv_dtype == DType::kFp8E4M3) shape.head_dim = 80;
    if (kv_dtype == DType::kF16) {
      shape.head_dim = 192;
      shape.value_dim = 128;
    }
#if TRIBUTARY_SHORT_GRID
    ExpectMatchesReference(shape, {CausalRows(100, 70)}, pool_);
#else
    ExpectMatchesReference(shape, {CausalRows(64, 16), CausalRows(700, 512)}, pool_);
#endif
  }
}

TEST_P(AttentionTest, WindowsOnBothSides) {
  for (const Window window : {Window{0, -1}, Window{15, -1}, Window{100, 0}, Window{-1, 3},
                              Window{7, 7}, Window{1500, -1}}) {
    AttentionShape shape;
    shape.kv_dtype = DType::kFp8E4M3;
    std::vector<KeyRange> block;  // rows that also look ahead, as a draft block does
    for (int64_t position = 90; position < 106; ++position) {
      block.push_back(VisibleKeys(position, window, 106));
    }
    ExpectMatchesReference(shape, {CausalRows(2100, 5, window), block}, pool_);
  }
}

// Rows of a block that see far apart ranges: the pages between are wild and must not be touched.
TEST_P(AttentionTest, RangesWithAGapBetween) {
  AttentionShape shape;
  shape.kv_dtype = DType::kFp8E5M2;
  ExpectMatchesReference(shape, {{{0, 10}, {40, 41}, {60, 70}, {3000, 3010}, {0, 3}, {130, 190}}},
                         pool_);
}

TEST_P(AttentionTest, SoftCap) {
  for (const float cap : {0.5f, 30.0f}) {
    AttentionShape shape;
    shape.head_dim = cap < 1 ? 64 : 96;
    shape.soft_cap = cap;
    shape.q_deviation = 20.0f;
    ExpectMatchesReference(shape, {CausalRows(300, 2)}, pool_);
  }
}

// Logits far below the cap keep their precision: their results are those without a cap.
TEST_P(AttentionTest, SoftCapOfAnySize) {
  for (const float cap : {1e-40f, 1e-30f, 65.0f, 1e3f, 1e6f, 1e8f, 1e30f, 3e38f}) {
    for (const DType kv_dtype : {DType::kBf16, DType::kF16}) {
      AttentionShape shape;
      shape.kv_dtype = kv_dtype;
      shape.soft_cap = cap;
      shape.q_deviation = 4.0f;
      AttentionCase c(shape, {CausalRows(300, 2)});
      ASSERT_TRUE(cpu::Attention(c.params(), pool_).ok());
      const ReferenceResult expected = ReferenceAttention(c.plain_params());
      SCOPED_TRACE(cap);
      EXPECT_TRUE(AllClose(c.lse, expected.lse, {2e-5, 2e-5}, c.lse_shape()));
    }
  }
}

TEST_P(AttentionTest, HugeLogitsBehaveAsSoftmaxDoes) {
  AttentionShape shape;
  shape.q_dtype = DType::kF32;
  shape.q_deviation = 1e4f;
  AttentionCase c(shape, {CausalRows(1500, 2)});
  const AttentionParams p = c.params();
  ASSERT_TRUE(cpu::Attention(p, pool_).ok());
  const ReferenceResult expected = ReferenceAttention(c.plain_params());
  // One key takes all: its value comes out whole. The LSE is the largest logit, about 1e4 in size.
  EXPECT_TRUE(AllClose(c.lse, expected.lse, {1e-3, 1e-6}, c.lse_shape()));
  EXPECT_TRUE(AllClose(c.o, expected.o, {5e-2, 1e-2}, c.o_shape()));
}

TEST_P(AttentionTest, OnlyOneLiveKeyIsReturnedExactly) {
  for (const DType kv_dtype : kCacheTypes) {
    for (const HeadDims& dims : kHeadDims) {
      AttentionShape shape;
      shape.kv_dtype = kv_dtype;
      shape.head_dim = dims.key_dim;
      shape.value_dim = dims.value_dim;
      AttentionCase c(shape, {{{777, 778}}});
      ASSERT_TRUE(cpu::Attention(c.params(), pool_).ok());
      for (int32_t head = 0; head < c.q_heads(); ++head) {
        for (int32_t d = 0; d < dims.value_dim; ++d) {
          const float value = c.Value(0, 777, head / shape.group, d);
          const float output = c.o[head * dims.value_dim + d];
          // A value of 24 bits is rounded when it is multiplied by its weight.
          if (kv_dtype == DType::kF32) {
            EXPECT_FLOAT_EQ(output, value);
          } else {
            EXPECT_EQ(output, value);
          }
        }
      }
    }
  }
}

// NaN in a key, a value or a query reaches the rows and heads that see it and no others.
TEST_P(AttentionTest, NanStaysWithTheRowsAndHeadsThatSeeIt) {
  for (const DType kv_dtype : kCacheTypes) {
    AttentionShape shape;
    shape.kv_dtype = kv_dtype;
    if (kv_dtype == DType::kBf16) shape.head_dim = 96;
    if (kv_dtype == DType::kFp8E5M2) shape.head_dim = 80;
    SCOPED_TRACE(Name(kv_dtype));
    AttentionCase c(shape, {CausalRows(90, 12), CausalRows(1030, 3)});
    c.Set(/*value=*/true, 0, 85, 0, 3, kNan);    // value of kv head 0, seen by rows 7..11
    c.Set(/*value=*/false, 0, 88, 1, 0, kNan);   // key of kv head 1, seen by rows 10 and 11
    c.Set(/*value=*/true, 1, 1028, 1, 9, kNan);  // value of kv head 1, seen by rows 13 and 14
    StoreElement(shape.q_dtype, c.q().data(), (size_t(2) * c.q_heads() + 5) * shape.head_dim, kNan);
    ExpectMatchesReference(c, shape, pool_);
    size_t nans = 0;
    for (const float x : c.lse) nans += std::isnan(x);
    EXPECT_EQ(nans, 2u * 4u + 1u);  // the key's rows, and the query; a value leaves the LSE alone
  }
}

TEST_P(AttentionTest, InfiniteValuesPassThrough) {
  AttentionShape shape;
  AttentionCase c(shape, {CausalRows(90, 12)});
  c.Set(/*value=*/true, 0, 85, 0, 3, kInf);
  c.Set(/*value=*/true, 0, 87, 1, 4, -kInf);
  ExpectMatchesReference(c, shape, pool_);
}

TEST_P(AttentionTest, InfiniteLogits) {
  AttentionShape shape;
  shape.q_dtype = DType::kF32;
  AttentionCase c(shape, {CausalRows(70, 1), CausalRows(70, 1)});
  // +inf in a key times a query of either sign: +inf makes NaN, as inf - inf does; -inf weighs 0.
  c.Set(/*value=*/false, 0, 33, 0, 0, kInf);
  ExpectMatchesReference(c, shape, pool_);
}

// The same bits whatever the number of threads.
TEST_P(AttentionTest, ThreadsDoNotChangeABit) {
  for (const DType kv_dtype : {DType::kBf16, DType::kFp8E4M3, DType::kF16, DType::kNvfp4}) {
    AttentionShape shape;
    shape.kv_dtype = kv_dtype;
    shape.kv_heads = 1;
    AttentionCase c(shape, {CausalRows(5000, 2), CausalRows(130, 20), CausalRows(2048, 1)});
    ASSERT_TRUE(cpu::Attention(c.params(), pool_).ok());
    const std::vector<float> o = c.o, lse = c.lse;
    for (const int threads : {1, 3, 7}) {
      cpu::ThreadPool pool(threads);
      Poison(std::span(c.o));
      Poison(std::span(c.lse));
      ASSERT_TRUE(cpu::Attention(c.params(), pool).ok());
      EXPECT_EQ(std::memcmp(o.data(), c.o.data(), o.size() * sizeof(float)), 0) << threads;
      EXPECT_EQ(std::memcmp(lse.data(), c.lse.data(), lse.size() * sizeof(float)), 0) << threads;
    }
  }
}

// The same bits whatever shares the batch, and whichever rows share the block.
TEST_P(AttentionTest, NeighboursDoNotChangeABit) {
  for (const DType kv_dtype : {DType::kBf16, DType::kFp8E4M3, DType::kF16, DType::kNvfp4}) {
    for (const int32_t group : {1, 4, 5}) {
      AttentionShape shape;
      shape.kv_dtype = kv_dtype;
      shape.group = group;
      if (group == 4) shape.head_dim = 80;
      if (group == 5) {
        shape.head_dim = 192;
        shape.value_dim = 128;
      }
      const Sequences sequences = {CausalRows(2200, 9), CausalRows(40, 1), CausalRows(1100, 30)};
      AttentionCase all(shape, sequences);
      // A value that is not finite makes rows of a tile go one by one.
      all.Set(/*value=*/true, 0, 2195, 0, 3, kNan);
      ASSERT_TRUE(cpu::Attention(all.params(), pool_).ok());
      const AttentionParams whole = all.params();
      const size_t row_elements = size_t(all.q_heads()) * shape.ValueDim();
      for (const AttentionEntry& entry : whole.entries) {
        for (int32_t row = entry.row_begin; row < entry.row_begin + entry.row_count; ++row) {
          const AttentionEntry alone{0, 1, entry.pages};
          std::vector<float> o(row_elements), lse(all.q_heads());
          AttentionParams p = whole;
          p.q = all.q().data() +
                BytesOf(shape.q_dtype, int64_t{row} * all.q_heads() * shape.head_dim);
          p.rows = 1;
          p.entries = std::span(&alone, 1);
          p.keys = whole.keys + row;
          p.o = o.data();
          p.lse = lse.data();
          ASSERT_TRUE(cpu::Attention(p, pool_).ok());
          EXPECT_EQ(
              std::memcmp(o.data(), whole.o + row * row_elements, row_elements * sizeof(float)), 0)
              << "row " << row << ", " << Describe(shape);
          EXPECT_EQ(std::memcmp(lse.data(), whole.lse + size_t(row) * all.q_heads(),
                                lse.size() * sizeof(float)),
                    0)
              << "row " << row << ", " << Describe(shape);
        }
      }
    }
  }
}

// Long rows are summed as accurately as short ones.
TEST(AttentionAccuracyTest, LongFp8RowsAreAsAccurateAsShortOnes) {
#if TRIBUTARY_SHORT_GRID
  constexpr int64_t kLong = 16 << 10;
#else
  constexpr int64_t kLong = 128 << 10;
#endif
  cpu::ThreadPool pool(2);
  double error[2] = {}, deviation[2] = {};
  const int64_t lengths[2] = {1024, kLong};
  for (int i = 0; i < 2; ++i) {
    AttentionShape shape;
    shape.kv_dtype = DType::kFp8E4M3;
    shape.q_dtype = DType::kF32;
    shape.kv_heads = 1;
    shape.page_size = 128;
    AttentionCase c(shape, {CausalRows(lengths[i], 1)});
    const AttentionParams p = c.params();
    ASSERT_TRUE(cpu::Attention(p, pool).ok());
    const ReferenceResult expected = ReferenceAttention(c.plain_params());
    EXPECT_TRUE(AllClose(c.lse, expected.lse, {2e-6, 2e-6}, c.lse_shape()));
    error[i] = RmsError(c.o, expected.o);
    deviation[i] = RmsError(std::vector<double>(expected.o.size()), expected.o);
  }
  // Averages over more keys are smaller; the error must shrink with them, and stay within float's.
  EXPECT_LT(error[0], 4e-6 * deviation[0] * 10);
  EXPECT_LE(error[1], 2 * error[0]);
  EXPECT_LT(error[1] / deviation[1], 4 * error[0] / deviation[0] + 1e-5);
}

}  // namespace
}  // namespace tributary::test
