// MergePartials against the reference, and against attention over all the keys at once.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/cpu/backend.h"
#include "tests/kernels/attention_case.h"
#include "tests/support/compare.h"

namespace tributary::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct MergeCase {
  MergeCase(int32_t sources, int32_t rows, int32_t heads, int32_t value_dim)
      : o(sources), lse(sources), out(size_t(rows) * heads * value_dim), lse_out(rows * heads) {
    std::mt19937 generator(sources);
    std::normal_distribution<float> normal;
    for (int32_t s = 0; s < sources; ++s) {
      o[s].resize(out.size());
      lse[s].resize(lse_out.size());
      for (float& x : o[s]) x = normal(generator);
      for (float& x : lse[s]) x = 5 * normal(generator);
    }
    for (int32_t s = 0; s < sources; ++s) {
      o_pointers.push_back(o[s].data());
      lse_pointers.push_back(lse[s].data());
    }
    Poison(std::span(out));
    Poison(std::span(lse_out));
    p.o = o_pointers;
    p.lse = lse_pointers;
    p.rows = rows;
    p.heads = heads;
    p.value_dim = value_dim;
    p.out = out.data();
    p.lse_out = lse_out.data();
  }
  MergeCase(const MergeCase&) = delete;
  MergeCase& operator=(const MergeCase&) = delete;

  // Makes a source empty for row-head `at`.
  void MakeEmpty(int32_t source, size_t at, float filler = 0.0f) {
    lse[source][at] = -kInf;
    std::fill_n(o[source].begin() + at * p.value_dim, p.value_dim, filler);
  }

  std::vector<std::vector<float>> o, lse;
  std::vector<const float*> o_pointers, lse_pointers;
  std::vector<float> out, lse_out;
  MergeParams p;
};

constexpr Tolerance kTolerance{2e-6, 2e-6};

void ExpectMatchesReference(const MergeCase& c, cpu::ThreadPool& pool) {
  const ReferenceResult expected = ReferenceMerge(c.p);
  const Status status = cpu::MergePartials(c.p, pool);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(AllClose(c.lse_out, expected.lse, kTolerance, {c.p.rows, c.p.heads}));
  EXPECT_TRUE(AllClose(c.out, expected.o, kTolerance, {c.p.rows, c.p.heads, c.p.value_dim}));
}

TEST(MergeTest, AnyNumberOfSources) {
  cpu::ThreadPool pool(2);
  for (const int32_t sources : {1, 2, 3, 4, 8, 17}) {
    for (const int32_t value_dim : {64, 80, 96, 128, 192, 256}) {
      MergeCase c(sources, 9, 5, value_dim);
      ExpectMatchesReference(c, pool);
    }
  }
}

TEST(MergeTest, EmptySourcesAreNotRead) {
  cpu::ThreadPool pool(2);
  MergeCase c(3, 4, 2, 64);
  for (int32_t s = 0; s < 3; ++s) c.MakeEmpty(s, 0);
  c.MakeEmpty(0, 1);
  c.MakeEmpty(2, 3, std::nanf(""));
  ExpectMatchesReference(c, pool);
  EXPECT_EQ(c.lse_out[0], -kInf);
  for (int32_t d = 0; d < 64; ++d) EXPECT_EQ(c.out[d], 0.0f);
}

TEST(MergeTest, SinksScaleTheOutputOnce) {
  cpu::ThreadPool pool(2);
  MergeCase c(4, 6, 3, 64);
  const float sinks[3] = {-kInf, 0.5f, 30.0f};
  c.p.sinks = sinks;
  for (int32_t s = 0; s < 4; ++s) c.MakeEmpty(s, 3);
  ExpectMatchesReference(c, pool);
}

TEST(MergeTest, NanStaysWithItsRowAndHead) {
  cpu::ThreadPool pool(2);
  MergeCase c(3, 4, 2, 64);
  c.lse[1][2] = std::nanf("");
  c.o[2][5 * 64 + 7] = std::nanf("");
  ExpectMatchesReference(c, pool);
  EXPECT_TRUE(std::isnan(c.lse_out[2]));
  EXPECT_TRUE(std::isnan(c.out[5 * 64 + 7]));
}

TEST(MergeTest, TheResultMayTakeTheplaceOfASource) {
  cpu::ThreadPool pool(2);
  for (int32_t victim = 0; victim < 3; ++victim) {
    MergeCase c(3, 40, 8, 128);
    const ReferenceResult expected = ReferenceMerge(c.p);
    c.p.out = c.o[victim].data();
    c.p.lse_out = c.lse[victim].data();
    ASSERT_TRUE(cpu::MergePartials(c.p, pool).ok());
    EXPECT_TRUE(AllClose(c.o[victim], expected.o, kTolerance, {40, 8, 128}));
    EXPECT_TRUE(AllClose(c.lse[victim], expected.lse, kTolerance, {40, 8}));
  }
}

TEST(MergeTest, TheLseIsOptional) {
  cpu::ThreadPool pool(1);
  MergeCase c(2, 3, 2, 64);
  const ReferenceResult expected = ReferenceMerge(c.p);
  c.p.lse_out = nullptr;
  ASSERT_TRUE(cpu::MergePartials(c.p, pool).ok());
  EXPECT_TRUE(AllClose(c.out, expected.o, kTolerance, {3, 2, 64}));
}

// Attention over slices of the keys, merged, is attention over the keys.
TEST(MergeTest, PartialsOfDisjointKeysMakeTheWhole) {
  cpu::ThreadPool pool(2);
  AttentionShape shape;
  AttentionCase c(shape, {CausalRows(300, 4)});
  const AttentionParams whole = c.params();
  const ReferenceResult expected = ReferenceAttention(c.plain_params());
  const int64_t cuts[] = {0, 1, 77, 77, 256, 300};
  MergeCase merge(5, 4, c.q_heads(), shape.head_dim);
  for (int s = 0; s < 5; ++s) {
    std::vector<KeyRange> keys;
    for (int32_t row = 0; row < 4; ++row) {
      keys.push_back({cuts[s], std::min(cuts[s + 1], whole.keys[row].hi)});
    }
    AttentionParams part = whole;
    part.keys = keys.data();
    part.o = merge.o[s].data();
    part.lse = merge.lse[s].data();
    ASSERT_TRUE(cpu::Attention(part, pool).ok());
  }
  ASSERT_TRUE(cpu::MergePartials(merge.p, pool).ok());
  EXPECT_TRUE(AllClose(merge.lse_out, expected.lse, kAttentionTolerance, c.lse_shape()));
  EXPECT_TRUE(AllClose(merge.out, expected.o, AttentionTolerance(whole.q_dtype), c.o_shape()));
}

}  // namespace
}  // namespace tributary::test
