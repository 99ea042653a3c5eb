// The algebra of partials against sums of exponentials written out.
#include "kernels/lse.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tributary::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Partial {
  double o = 0;
  double lse = -kInf;
};

Partial MergeTwo(const Partial& a, const Partial& b) {
  const MergeWeights<double> w = Merge(a.lse, b.lse);
  return {w.a * a.o + w.b * b.o, w.lse};
}

// Attention over logits and values, written out.
Partial Attend(const std::vector<double>& logits, const std::vector<double>& values, size_t begin,
               size_t end) {
  long double sum = 0, weighted = 0;
  for (size_t i = begin; i < end; ++i) {
    sum += std::exp(static_cast<long double>(logits[i]));
    weighted += std::exp(static_cast<long double>(logits[i])) * values[i];
  }
  if (begin == end) return {};
  return {static_cast<double>(weighted / sum), static_cast<double>(std::log(sum))};
}

TEST(LseTest, MergingPartsGivesTheWholeHoweverTheyAreCutAndOrdered) {
  std::mt19937 generator(1);
  std::normal_distribution<double> normal(0, 3);
  std::vector<double> logits(60), values(60);
  for (double& x : logits) x = normal(generator);
  for (double& x : values) x = normal(generator);
  const Partial whole = Attend(logits, values, 0, 60);
  for (size_t i = 0; i <= 60; i += 7) {
    for (size_t j = i; j <= 60; j += 11) {
      const Partial a = Attend(logits, values, 0, i);
      const Partial b = Attend(logits, values, i, j);
      const Partial c = Attend(logits, values, j, 60);
      for (const Partial& merged : {MergeTwo(MergeTwo(a, b), c), MergeTwo(a, MergeTwo(b, c)),
                                    MergeTwo(MergeTwo(c, a), b)}) {
        EXPECT_NEAR(merged.o, whole.o, 1e-13);
        EXPECT_NEAR(merged.lse, whole.lse, 1e-13);
      }
    }
  }
}

TEST(LseTest, TheIdentityChangesNoBit) {
  for (const double lse : {-700.0, -1.5, 0.0, 3.25, 1e30}) {
    const MergeWeights<double> left = Merge(EmptyLse<double>(), lse);
    EXPECT_EQ(left.a, 0.0);
    EXPECT_EQ(left.b, 1.0);
    EXPECT_EQ(left.lse, lse);
    const MergeWeights<double> right = Merge(lse, EmptyLse<double>());
    EXPECT_EQ(right.a, 1.0);
    EXPECT_EQ(right.b, 0.0);
    EXPECT_EQ(right.lse, lse);
  }
}

TEST(LseTest, TwoEmptyPartialsMakeAnEmptyOne) {
  const MergeWeights<float> w = Merge(EmptyLse<float>(), EmptyLse<float>());
  EXPECT_EQ(w.a, 0.0f);
  EXPECT_EQ(w.b, 0.0f);
  EXPECT_EQ(w.lse, EmptyLse<float>());
}

TEST(LseTest, NanOnEitherSideComesOut) {
  for (const double other : {0.0, -kInf, kInf, kNan}) {
    EXPECT_TRUE(std::isnan(Merge(kNan, other).lse)) << other;
    EXPECT_TRUE(std::isnan(Merge(other, kNan).lse)) << other;
    EXPECT_TRUE(std::isnan(Merge(kNan, other).a)) << other;
    EXPECT_TRUE(std::isnan(Merge(other, kNan).b)) << other;
  }
}

TEST(LseTest, FarApartPartialsDoNotOverflow) {
  const MergeWeights<float> w = Merge(3e38f, -3e38f);
  EXPECT_EQ(w.a, 1.0f);
  EXPECT_EQ(w.b, 0.0f);
  EXPECT_EQ(w.lse, 3e38f);
}

// The n-ary form, as its users write it: the output and the LSE of the union.
Partial MergeAll(const std::vector<Partial>& partials) {
  UnionLse<double> of_all;
  for (const Partial& p : partials) of_all.See(p.lse);
  double o = 0;
  for (const Partial& p : partials) {
    const double weight = of_all.WeightOf(p.lse);
    if (weight == 0) continue;
    of_all.Add(weight);
    o += weight * p.o;
  }
  return {o * of_all.Scale(), of_all.Lse()};
}

TEST(LseTest, AUnionOfManyIsWhatMergingThemOneByOneGives) {
  const std::vector<Partial> partials = {{1.5, -3.0}, {}, {-2.0, 4.5}, {0.25, 4.0}, {9.0, -700.0}};
  Partial one_by_one;
  for (const Partial& p : partials) one_by_one = MergeTwo(one_by_one, p);
  const Partial merged = MergeAll(partials);
  EXPECT_NEAR(merged.o, one_by_one.o, 1e-14);
  EXPECT_NEAR(merged.lse, one_by_one.lse, 1e-14);
}

TEST(LseTest, AUnionOfOneIsThatOneToTheBit) {
  for (const double lse : {-700.0, -1.5, 0.0, 3.25, 1e30}) {
    const Partial merged = MergeAll({{}, {1.25, lse}, {}});
    EXPECT_EQ(merged.o, 1.25);
    EXPECT_EQ(merged.lse, lse);
  }
}

TEST(LseTest, AUnionWithoutKeysIsEmptyWhateverItsOutputsHold) {
  for (const std::vector<Partial>& partials :
       {std::vector<Partial>{}, std::vector<Partial>{{kNan, -kInf}, {kInf, -kInf}}}) {
    const Partial merged = MergeAll(partials);
    EXPECT_EQ(merged.o, 0.0);
    EXPECT_EQ(merged.lse, -kInf);
  }
}

TEST(LseTest, ANanAmongManyComesOut) {
  for (const double other : {0.0, -kInf, kInf, kNan}) {
    for (const std::vector<Partial>& partials :
         {std::vector<Partial>{{1.0, kNan}, {2.0, other}}, {{2.0, other}, {1.0, kNan}}}) {
      const Partial merged = MergeAll(partials);
      EXPECT_TRUE(std::isnan(merged.o)) << other;
      EXPECT_TRUE(std::isnan(merged.lse)) << other;
    }
  }
}

TEST(LseTest, TheSharesOfAUnionAddUpToOne) {
  UnionLse<double> of_all;
  for (const double lse : {1.0, 2.0, -kInf}) of_all.See(lse);
  for (const double lse : {1.0, 2.0, -kInf}) of_all.Add(of_all.WeightOf(lse));
  EXPECT_NEAR(of_all.ShareOf(of_all.WeightOf(1.0)) + of_all.ShareOf(of_all.WeightOf(2.0)), 1.0,
              1e-15);
  EXPECT_EQ(of_all.ShareOf(of_all.WeightOf(-kInf)), 0.0);
  EXPECT_EQ(UnionLse<double>().ShareOf(0.0), 0.0);
}

TEST(LseTest, ASinkIsAKeyWithoutAValue) {
  const std::vector<double> logits = {0.3, -1.0, 2.0}, values = {1.0, -2.0, 0.5};
  const Partial whole = Attend(logits, values, 0, 3);
  for (const double sink : {-4.0, 0.0, 5.0}) {
    const Partial with_sink =
        Attend({0.3, -1.0, 2.0, sink}, {1.0, -2.0, 0.5, 0.0}, 0, 4);  // a fourth key of value 0
    EXPECT_NEAR(whole.o * SinkScale(whole.lse, sink), with_sink.o, 1e-14);
  }
  EXPECT_EQ(SinkScale(1.0, -kInf), 1.0);
  EXPECT_EQ(SinkScale(-kInf, 0.0), 0.0);
}

}  // namespace
}  // namespace tributary::test
