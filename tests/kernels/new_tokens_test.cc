// Attention of new tokens over each other against the float64 reference.
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/cpu/backend.h"
#include "kernels/head_dims.h"
#include "tests/kernels/attention_case.h"
#include "tests/kernels/dispatch.h"
#include "tests/support/compare.h"

namespace tributary::test {
namespace {

struct NewTokensShape {
  DType q_dtype = DType::kBf16;
  DType kv_dtype = DType::kBf16;
  int32_t key_dim = 64;
  int32_t value_dim = 64;
  int32_t kv_heads = 2;
  int32_t group = 4;
  int32_t head_begin = 0;
  int32_t head_count = -1;  // all
  float soft_cap = 0.0f;
  Window window;
  std::vector<int32_t> lengths = {37};
};

struct NewTokensCase {
  explicit NewTokensCase(const NewTokensShape& s) {
    for (const int32_t length : s.lengths) {
      entries.push_back({p.rows, length});
      p.rows += length;
      for (int64_t i = 0; i < length; ++i) keys.push_back(VisibleKeys(i, s.window, i + 1));
    }
    p.q_heads = s.kv_heads * s.group;
    p.kv_heads = s.kv_heads;
    p.key_dim = s.key_dim;
    p.value_dim = s.value_dim;
    p.head_begin = s.head_begin;
    p.head_count = s.head_count < 0 ? p.q_heads : s.head_count;
    q = RandomTensor(s.q_dtype, size_t(p.rows) * p.q_heads * s.key_dim, 1);
    k = RandomTensor(s.kv_dtype, size_t(p.rows) * s.kv_heads * s.key_dim, 2);
    v = RandomTensor(s.kv_dtype, size_t(p.rows) * s.kv_heads * s.value_dim, 3);
    p.q_dtype = s.q_dtype;
    p.kv_dtype = s.kv_dtype;
    p.q = q.data();
    p.k = k.data();
    p.v = v.data();
    p.entries = entries;
    p.keys = keys.data();
    p.sm_scale = 0.11f;
    p.soft_cap = s.soft_cap;
    o.resize(size_t(p.rows) * p.head_count * s.value_dim);
    lse.resize(size_t(p.rows) * p.head_count);
    Poison(std::span(o));
    Poison(std::span(lse));
    p.o = o.data();
    p.lse = lse.data();
  }
  NewTokensCase(const NewTokensCase&) = delete;
  NewTokensCase& operator=(const NewTokensCase&) = delete;

  std::vector<NewTokensEntry> entries;
  std::vector<KeyRange> keys;
  std::vector<std::byte> q, k, v;
  std::vector<float> o, lse;
  NewTokensParams p;
};

class NewTokensTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void ExpectMatchesReference(const NewTokensCase& c) {
    SCOPED_TRACE(std::string("q ") + Name(c.p.q_dtype) + ", kv " + Name(c.p.kv_dtype) +
                 ", head dims " + HeadDimsName(c.p.key_dim, c.p.value_dim) + ", heads " +
                 std::to_string(c.p.head_begin) + " + " + std::to_string(c.p.head_count) + " of " +
                 std::to_string(c.p.q_heads) + " / " + std::to_string(c.p.kv_heads));
    const Status status = cpu::NewTokens(c.p, pool_);
    ASSERT_TRUE(status.ok()) << status.message();
    const ReferenceResult expected = ReferenceNewTokens(c.p);
    EXPECT_TRUE(AllClose(c.lse, expected.lse, kAttentionTolerance, {c.p.rows, c.p.head_count}));
    EXPECT_TRUE(AllClose(c.o, expected.o, AttentionTolerance(c.p.q_dtype),
                         {c.p.rows, c.p.head_count, c.p.value_dim}));
  }
  void ExpectMatchesReference(const NewTokensShape& shape) {
    ExpectMatchesReference(NewTokensCase(shape));
  }

  ForcedTarget target_{GetParam()};
  cpu::ThreadPool pool_{2};
};
INSTANTIATE_TEST_SUITE_P(Targets, NewTokensTest, ::testing::ValuesIn(Targets()), TargetName);

TEST_P(NewTokensTest, EveryTypeHeadDimAndGroup) {
  for (const DType kv_dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const DType q_dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      NewTokensShape shape;
      shape.q_dtype = q_dtype;
      shape.kv_dtype = kv_dtype;
      ExpectMatchesReference(shape);
    }
    for (const HeadDims& dims : kHeadDims) {
      for (const int32_t group : {1, 16}) {
        NewTokensShape shape;
        shape.kv_dtype = kv_dtype;
        shape.key_dim = dims.key_dim;
        shape.value_dim = dims.value_dim;
        shape.group = group;
        ExpectMatchesReference(shape);
      }
    }
  }
}

TEST_P(NewTokensTest, SlicesOfHeadsMayCutGroups) {
  for (int32_t begin = 0; begin < 8; ++begin) {
    for (int32_t count = 0; begin + count <= 8; count += 3) {
      NewTokensShape shape;
      shape.head_begin = begin;
      shape.head_count = count;
      shape.lengths = {3, 20};
      ExpectMatchesReference(shape);
    }
  }
}

TEST_P(NewTokensTest, SeveralSequencesKeepToThemselves) {
  NewTokensShape shape;
  shape.lengths = {1, 0, 65, 2, 128, 17};
  ExpectMatchesReference(shape);
}

TEST_P(NewTokensTest, WindowsAndSoftCap) {
  NewTokensShape shape;
  shape.lengths = {150};
  shape.window = {20, -1};
  shape.soft_cap = 3.0f;
  ExpectMatchesReference(shape);
}

TEST_P(NewTokensTest, Long) {
  NewTokensShape shape;
  shape.kv_heads = 1;
#if TRIBUTARY_SHORT_GRID
  shape.lengths = {130};
#else
  shape.lengths = {512, 1100};
  shape.group = 2;
#endif
  ExpectMatchesReference(shape);
}

// A row's NaN does not reach the rows before it, which do not see it, though a block holds both.
TEST_P(NewTokensTest, LaterNansDoNotReachEarlierRows) {
  for (const HeadDims& dims : kHeadDims) {
    NewTokensShape shape;
    shape.lengths = {100};
    shape.key_dim = dims.key_dim;
    shape.value_dim = dims.value_dim;
    NewTokensCase c(shape);
    const size_t heads = c.p.kv_heads;
    StoreElement(shape.kv_dtype, c.v.data(), 70 * heads * c.p.value_dim + 3, std::nanf(""));
    StoreElement(shape.kv_dtype, c.k.data(), (90 * heads + 1) * c.p.key_dim, std::nanf(""));
    ExpectMatchesReference(c);
    for (int32_t row = 0; row < 100; ++row) {
      const size_t at = size_t(row) * c.p.head_count;
      EXPECT_EQ(std::isnan(c.o[at * c.p.value_dim + 3]), row >= 70) << row;
      EXPECT_EQ(std::isnan(c.lse[at + 7]), row >= 90) << row;
    }
  }
}

TEST_P(NewTokensTest, ThreadsAndSlicesDoNotChangeABit) {
  NewTokensShape shape;
  shape.lengths = {200};
  NewTokensCase whole(shape);
  ASSERT_TRUE(cpu::NewTokens(whole.p, pool_).ok());
  for (const int threads : {1, 5}) {
    shape.head_begin = 3;
    shape.head_count = 4;
    NewTokensCase slice(shape);
    cpu::ThreadPool pool(threads);
    ASSERT_TRUE(cpu::NewTokens(slice.p, pool).ok());
    for (int32_t row = 0; row < 200; ++row) {
      const size_t n = size_t{4} * shape.value_dim;
      EXPECT_EQ(std::memcmp(&whole.o[(size_t(row) * 8 + 3) * shape.value_dim], &slice.o[row * n],
                            n * sizeof(float)),
                0)
          << row;
    }
  }
}

}  // namespace
}  // namespace tributary::test
