// The exchange of partials: every strategy and placement against a merge in float64.
#include "collective/exchange/exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "kernels/reference.h"
#include "tests/collective/group.h"

namespace tributary::collective {
namespace {

using testing::HasSubstr;

constexpr Strategy kStrategies[] = {Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a};
constexpr Placement kPlacements[] = {Placement::kGathered, Placement::kScattered};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kPoison = -12345.0f;

// ---------------------------------------------------------------------------------------------
// Choices

TEST(SliceOfRank, CoversAllHeadsInOrderAndEvenly) {
  for (int32_t size = 1; size <= 9; ++size) {
    for (int32_t heads = 0; heads <= 40; ++heads) {
      int32_t next = 0;
      for (int32_t rank = 0; rank < size; ++rank) {
        const HeadSlice s = SliceOfRank(heads, size, rank);
        EXPECT_EQ(s.begin, next);
        EXPECT_GE(s.count, heads / size);
        EXPECT_LE(s.count, (heads + size - 1) / size);
        if (rank > 0) {
          EXPECT_LE(s.count, SliceOfRank(heads, size, rank - 1).count);
        }
        next += s.count;
      }
      EXPECT_EQ(next, heads);
    }
  }
}

TEST(Strategy, NamesAreParsedBack) {
  for (const Strategy s : {Strategy::kAuto, Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a,
                           Strategy::kDirect}) {
    Strategy parsed = s == Strategy::kAuto ? Strategy::kA2a : Strategy::kAuto;
    EXPECT_TRUE(Parse(Name(s), &parsed));
    EXPECT_EQ(parsed, s);
  }
  Strategy unchanged = Strategy::kA2a;
  for (const char* text : {"", "A2A", "a2a ", "all-gather", "?"}) {
    EXPECT_FALSE(Parse(text, &unchanged)) << text;
  }
  EXPECT_EQ(unchanged, Strategy::kA2a);
  EXPECT_STREQ(Name(Placement::kGathered), "gathered");
  EXPECT_STREQ(Name(Placement::kScattered), "scattered");
}

ExchangeShape Shape(int32_t rows, int32_t ranks, Placement placement) {
  return {.rows = rows, .heads = 32, .value_dim = 128, .ranks = ranks, .placement = placement};
}

TEST(ChooseStrategy, ForcedWins) {
  for (const Strategy s : kStrategies) {
    EXPECT_EQ(ChooseStrategy(Shape(1, 4, Placement::kGathered), s), s);
    EXPECT_EQ(ChooseStrategy(Shape(4096, 4, Placement::kScattered), s), s);
  }
}

TEST(ChooseStrategy, ScatteredTakesOneOperation) {
  for (const int32_t rows : {1, 16, 4096}) {
    EXPECT_EQ(ChooseStrategy(Shape(rows, 4, Placement::kScattered), Strategy::kAuto),
              Strategy::kA2a);
  }
}

TEST(ChooseStrategy, GatheredSpreadsOnlyLargeMerges) {
  EXPECT_EQ(ChooseStrategy(Shape(1, 4, Placement::kGathered), Strategy::kAuto),
            Strategy::kAllGather);
  EXPECT_EQ(ChooseStrategy(Shape(512, 4, Placement::kGathered), Strategy::kAuto), Strategy::kA2a);
  // Two ranks: a second operation saves nothing.
  EXPECT_EQ(ChooseStrategy(Shape(512, 2, Placement::kGathered), Strategy::kAuto),
            Strategy::kAllGather);
  EXPECT_EQ(ChooseStrategy(Shape(512, 1, Placement::kGathered), Strategy::kAuto),
            Strategy::kAllGather);
}

TEST(ChooseStrategy, OnceLargeStaysLarge) {
  for (const int32_t ranks : {3, 4, 8, 16}) {
    bool large = false;
    for (int32_t rows = 1; rows <= 1024; ++rows) {
      const bool a2a = ChooseStrategy(Shape(rows, ranks, Placement::kGathered), Strategy::kAuto) ==
                       Strategy::kA2a;
      EXPECT_TRUE(a2a || !large) << ranks << " ranks, " << rows << " rows";
      large = a2a;
    }
    EXPECT_TRUE(large);
  }
}

TEST(ChooseStrategy, DirectIsRefusedBetweenHosts) {
  float o = 1.0f, lse = 0.0f, out = kPoison;
  ExchangeWorkspace workspace;
  Group two = MakeGroup(Kind::kInProcess, 2);
  const Status s = ExchangeAndMerge({.o = &o,
                                     .lse = &lse,
                                     .rows = 1,
                                     .heads = 1,
                                     .value_dim = 1,
                                     .strategy = Strategy::kDirect,
                                     .out = &out},
                                    *two[0], workspace, Far());
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), testing::HasSubstr("strategy"));
  EXPECT_EQ(out, kPoison);
}

TEST(ExchangeWorkspace, GrowsAndStays) {
  ExchangeWorkspace workspace;
  std::byte* large = workspace.Reserve(1 << 20);
  EXPECT_EQ(workspace.Reserve(1000), large);
  EXPECT_EQ(workspace.Reserve(1 << 20), large);
}

// ---------------------------------------------------------------------------------------------
// Partials

struct Shard {
  std::vector<float> o;    // [rows, heads, value_dim]
  std::vector<float> lse;  // [rows, heads]
};

struct Problem {
  int32_t rows, heads, value_dim;
  std::vector<Shard> shards;  // one per rank
  std::vector<float> sinks;   // [heads]

  size_t lse_size() const { return static_cast<size_t>(rows) * heads; }
  size_t o_size() const { return lse_size() * value_dim; }

  ReferenceResult Reference(bool with_sinks) const {
    std::vector<const float*> o, lse;
    for (const Shard& s : shards) {
      o.push_back(s.o.data());
      lse.push_back(s.lse.data());
    }
    return ReferenceMerge({.o = o,
                           .lse = lse,
                           .rows = rows,
                           .heads = heads,
                           .value_dim = value_dim,
                           .sinks = with_sinks ? sinks.data() : nullptr});
  }
};

// Random partials. A third of them are empty, with NaN in their O; every seventh row has no keys on
// any rank.
Problem RandomProblem(int32_t rows, int32_t heads, int32_t value_dim, int32_t ranks,
                      uint32_t seed) {
  Problem p{rows, heads, value_dim, {}, {}};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  for (int32_t r = 0; r < ranks; ++r) {
    Shard s{std::vector<float>(p.o_size()), std::vector<float>(p.lse_size())};
    for (size_t at = 0; at < p.lse_size(); ++at) {
      const bool empty = (at / heads) % 7 == 6 || uniform(random) < 0.33f;
      s.lse[at] = empty ? -kInf : 6.0f * normal(random);
      for (int32_t d = 0; d < value_dim; ++d) {
        s.o[at * value_dim + d] = empty ? kNan : normal(random);
      }
    }
    p.shards.push_back(std::move(s));
  }
  for (int32_t h = 0; h < heads; ++h) p.sinks.push_back(h % 5 == 4 ? -kInf : normal(random));
  return p;
}

// ---------------------------------------------------------------------------------------------
// Running

struct Result {
  std::vector<float> o;    // [rows, heads, value_dim]
  std::vector<float> lse;  // [rows, heads], empty when not asked for
};

struct Options {
  Strategy strategy = Strategy::kAuto;
  Placement placement = Placement::kGathered;
  bool sinks = false;
  bool wants_lse = true;
};

class Runner {
 public:
  Runner(Kind kind, int ranks) : group_(MakeGroup(kind, ranks)), workspaces_(ranks) {}
  ~Runner() { Destroy(group_); }

  int ranks() const { return static_cast<int>(group_.size()); }
  Communicator& comm(int rank) { return *group_[rank]; }
  ExchangeWorkspace& workspace(int rank) { return workspaces_[rank]; }

  // The result put together from what the ranks got; also checks that nothing else was written.
  Result Run(const Problem& p, const Options& options) {
    std::vector<Result> of_rank(ranks());
    OnEveryRank(ranks(), [&](int rank) { of_rank[rank] = RunRank(p, options, rank); });
    if (options.placement == Placement::kGathered) return of_rank[0];
    Result whole = Empty(p, p.heads, options.wants_lse);
    for (int rank = 0; rank < ranks(); ++rank) {
      const HeadSlice s = SliceOfRank(p.heads, ranks(), rank);
      for (int32_t row = 0; row < p.rows; ++row) {
        for (int32_t h = 0; h < s.count; ++h) {
          const size_t from = static_cast<size_t>(row) * s.count + h;
          const size_t to = static_cast<size_t>(row) * p.heads + s.begin + h;
          if (options.wants_lse) whole.lse[to] = of_rank[rank].lse[from];
          std::copy_n(&of_rank[rank].o[from * p.value_dim], p.value_dim,
                      &whole.o[to * p.value_dim]);
        }
      }
    }
    return whole;
  }

 private:
  static Result Empty(const Problem& p, size_t heads, bool wants_lse) {
    return {std::vector<float>(p.rows * heads * p.value_dim, kPoison),
            std::vector<float>(wants_lse ? p.rows * heads : 0, kPoison)};
  }

  Result RunRank(const Problem& p, const Options& options, int rank) {
    const bool gathered = options.placement == Placement::kGathered;
    const size_t heads =
        gathered ? (rank == 0 ? p.heads : 0) : SliceOfRank(p.heads, ranks(), rank).count;
    Result r = Empty(p, heads, options.wants_lse);
    const size_t o_size = r.o.size(), lse_size = r.lse.size();
    r.o.push_back(kPoison);
    r.lse.push_back(kPoison);
    const Status s =
        ExchangeAndMerge({.o = p.shards[rank].o.data(),
                          .lse = p.shards[rank].lse.data(),
                          .rows = p.rows,
                          .heads = p.heads,
                          .value_dim = p.value_dim,
                          .sinks = options.sinks ? p.sinks.data() : nullptr,
                          .placement = options.placement,
                          .strategy = options.strategy,
                          .out = heads > 0 ? r.o.data() : nullptr,
                          .lse_out = heads > 0 && options.wants_lse ? r.lse.data() : nullptr},
                         comm(rank), workspace(rank), Far());
    EXPECT_TRUE(s.ok()) << Text(s);
    EXPECT_EQ(r.o.back(), kPoison) << "written past out";
    EXPECT_EQ(r.lse.back(), kPoison) << "written past lse_out";
    r.o.resize(o_size);
    r.lse.resize(lse_size);
    return r;
  }

  Group group_;
  std::vector<ExchangeWorkspace> workspaces_;
};

// NaN and infinities in the same places, then the error. The merge of a few partials loses a few
// units in the last place of the largest partial, which is of order 1.
void ExpectClose(const std::vector<float>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::isnan(got[i]), std::isnan(want[i])) << what << " at " << i << ": " << got[i];
    if (std::isnan(want[i])) continue;
    if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], static_cast<float>(want[i])) << what << " at " << i;
      continue;
    }
    ASSERT_NEAR(got[i], want[i], 4e-6 * (1.0 + std::abs(want[i]))) << what << " at " << i;
  }
}

void ExpectEqual(const std::vector<float>& got, const std::vector<float>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    ASSERT_EQ(got[i], want[i]) << what << " at " << i;
  }
}

std::string Describe(const Problem& p, const Options& o) {
  return std::string(Name(o.strategy)) + " " + Name(o.placement) + ", rows " +
         std::to_string(p.rows) + ", heads " + std::to_string(p.heads) + ", head dim " +
         std::to_string(p.value_dim) + (o.sinks ? ", sinks" : "");
}

void ExpectRight(Runner& runner, const Problem& p, const Options& options) {
  SCOPED_TRACE(Describe(p, options));
  const Result got = runner.Run(p, options);
  const ReferenceResult want = p.Reference(options.sinks);
  ExpectClose(got.o, want.o, "o");
  if (options.wants_lse) ExpectClose(got.lse, want.lse, "lse");
}

// Every strategy and placement, with and without sinks.
void ExpectRightEveryWay(Runner& runner, const Problem& p) {
  for (const bool sinks : {false, true}) {
    for (const Placement placement : kPlacements) {
      for (const Strategy strategy : kStrategies) {
        ExpectRight(runner, p, {.strategy = strategy, .placement = placement, .sinks = sinks});
      }
    }
  }
}

class ExchangeTest : public testing::TestWithParam<GroupParam> {
 protected:
  ExchangeTest() : runner_(GetParam().kind, GetParam().size) {}

  static bool Short() {
#ifdef TRIBUTARY_SHORT_GRID
    return true;
#else
    return GetParam().kind != Kind::kInProcess;  // the arithmetic is the same; only bytes travel
#endif
  }
  static std::vector<int32_t> Heads() {
    return Short() ? std::vector<int32_t>{2, 5, 8} : std::vector<int32_t>{1, 2, 3, 5, 8, 13, 32};
  }
  static std::vector<int32_t> Rows() {
    return Short() ? std::vector<int32_t>{1, 9} : std::vector<int32_t>{1, 2, 9, 64};
  }
  static std::vector<int32_t> HeadDims() {
    return Short() ? std::vector<int32_t>{64} : std::vector<int32_t>{1, 64, 128};
  }

  Runner runner_;
};

TEST_P(ExchangeTest, EveryShapeAgainstTheReference) {
  uint32_t seed = 0;
  for (const int32_t heads : Heads()) {
    for (const int32_t rows : Rows()) {
      for (const int32_t value_dim : HeadDims()) {
        ExpectRightEveryWay(runner_,
                            RandomProblem(rows, heads, value_dim, runner_.ranks(), ++seed));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ExchangeTest, StrategiesAgreeToTheBit) {
  const Problem p = RandomProblem(11, 7, 64, runner_.ranks(), 17);
  for (const bool sinks : {false, true}) {
    const Result first = runner_.Run(p, {.strategy = Strategy::kAllGather, .sinks = sinks});
    for (const Placement placement : kPlacements) {
      for (const Strategy strategy : kStrategies) {
        const Options options{.strategy = strategy, .placement = placement, .sinks = sinks};
        SCOPED_TRACE(Describe(p, options));
        const Result other = runner_.Run(p, options);
        ExpectEqual(other.o, first.o, "o");
        ExpectEqual(other.lse, first.lse, "lse");
      }
    }
  }
}

TEST_P(ExchangeTest, LseIsOptional) {
  const Problem p = RandomProblem(3, 5, 16, runner_.ranks(), 3);
  for (const Placement placement : kPlacements) {
    for (const Strategy strategy : kStrategies) {
      ExpectRight(runner_, p, {.strategy = strategy, .placement = placement, .wants_lse = false});
    }
  }
}

TEST_P(ExchangeTest, ChoosesForItself) {
  for (const int32_t rows : {1, 200}) {
    const Problem p = RandomProblem(rows, 8, 64, runner_.ranks(), rows);
    for (const Placement placement : kPlacements) {
      ExpectRight(runner_, p, {.placement = placement, .sinks = true});
    }
  }
}

TEST_P(ExchangeTest, NothingToExchange) {
  ExpectRightEveryWay(runner_, RandomProblem(0, 8, 64, runner_.ranks(), 1));
  ExpectRightEveryWay(runner_, RandomProblem(8, 0, 64, runner_.ranks(), 1));
}

TEST_P(ExchangeTest, AllShardsEmpty) {
  Problem p = RandomProblem(2, 5, 16, runner_.ranks(), 5);
  for (Shard& s : p.shards) {
    s.o.assign(s.o.size(), kNan);
    s.lse.assign(s.lse.size(), -kInf);
  }
  ExpectRightEveryWay(runner_, p);
  const Result r = runner_.Run(p, {.sinks = true});
  EXPECT_THAT(r.o, testing::Each(0.0f));
  EXPECT_THAT(r.lse, testing::Each(-kInf));
}

// Only one rank has keys: the result is its partial, to the bit.
TEST_P(ExchangeTest, OneShardHoldsAll) {
  for (int owner = 0; owner < runner_.ranks(); ++owner) {
    Problem p = RandomProblem(3, 5, 16, runner_.ranks(), owner);
    for (int r = 0; r < runner_.ranks(); ++r) {
      Shard& s = p.shards[r];
      for (size_t i = 0; i < s.lse.size(); ++i) s.lse[i] = r == owner ? 0.25f * i - 1.0f : -kInf;
      for (size_t i = 0; i < s.o.size(); ++i) s.o[i] = r == owner ? 0.5f + i : kNan;
    }
    for (const Placement placement : kPlacements) {
      for (const Strategy strategy : kStrategies) {
        const Options options{.strategy = strategy, .placement = placement};
        SCOPED_TRACE(Describe(p, options));
        const Result r = runner_.Run(p, options);
        ExpectEqual(r.o, p.shards[owner].o, "o");
        ExpectEqual(r.lse, p.shards[owner].lse, "lse");
      }
    }
  }
}

// Whoever is alone may have its partial where the result goes. It gets what it would elsewhere.
TEST(ExchangeAlone, MergesInPlace) {
  constexpr int32_t kRows = 3, kHeads = 4, kDim = 8;
  Group group = MakeGroup(Kind::kInProcess, 1);
  ExchangeWorkspace workspace;
  std::vector<float> o(kRows * kHeads * kDim), lse(kRows * kHeads);
  for (size_t i = 0; i < o.size(); ++i) o[i] = 0.37f * i - 5.0f;
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = 1.5f * i - 7.0f;
  o[3] = kNan;
  lse[1] = -kInf;  // without keys, whatever O holds there
  o[kDim] = kNan;
  lse[6] = kNan;
  const std::vector<float> sinks = {0.5f, -kInf, 2.0f, 30.0f};
  for (const float* const sink : {static_cast<const float*>(nullptr), sinks.data()}) {
    std::vector<float> out(o.size(), kPoison), lse_out(lse.size(), kPoison);
    ExchangeParams params{.o = o.data(),
                          .lse = lse.data(),
                          .rows = kRows,
                          .heads = kHeads,
                          .value_dim = kDim,
                          .sinks = sink,
                          .out = out.data(),
                          .lse_out = lse_out.data()};
    ASSERT_TRUE(ExchangeAndMerge(params, *group[0], workspace, Far()).ok());
    EXPECT_EQ(out[kDim], 0.0f);
    EXPECT_EQ(lse_out[1], -kInf);
    EXPECT_TRUE(std::isnan(out[3]) && std::isnan(out[6 * kDim]) && std::isnan(lse_out[6]));
    EXPECT_FALSE(std::isnan(out[4]));
    if (sink == nullptr) {
      EXPECT_EQ(out[5 * kDim + 2], o[5 * kDim + 2]);
    } else {
      EXPECT_LT(std::abs(out[3 * kDim]), 1e-12) << "the sink takes all";
    }
    std::vector<float> own_o = o, own_lse = lse;
    params.o = params.out = own_o.data();
    params.lse = params.lse_out = own_lse.data();
    ASSERT_TRUE(ExchangeAndMerge(params, *group[0], workspace, Far()).ok());
    ExpectEqual(own_o, out, "o");
    ExpectEqual(own_lse, lse_out, "lse");
  }
}

// A NaN stays where it is: in its element when O holds it, in its row and head when LSE does.
TEST_P(ExchangeTest, NanStaysInItsPlace) {
  Problem p = RandomProblem(6, 5, 8, runner_.ranks(), 23);
  Shard& last = p.shards.back();
  const size_t in_o = 1 * 5 + 2, in_lse = 3 * 5 + 4;
  for (Shard& s : p.shards) s.lse[in_o] = s.lse[in_lse] = 0.5f;
  for (Shard& s : p.shards) std::fill_n(&s.o[in_o * 8], 8, 1.0f);
  for (Shard& s : p.shards) std::fill_n(&s.o[in_lse * 8], 8, 1.0f);
  last.o[in_o * 8 + 3] = kNan;
  last.lse[in_lse] = kNan;
  ExpectRightEveryWay(runner_, p);
  const Result r = runner_.Run(p, {});
  for (size_t i = 0; i < r.o.size(); ++i) {
    EXPECT_EQ(std::isnan(r.o[i]), i == in_o * 8 + 3 || i / 8 == in_lse) << "o at " << i;
  }
  for (size_t i = 0; i < r.lse.size(); ++i) {
    EXPECT_EQ(std::isnan(r.lse[i]), i == in_lse) << "lse at " << i;
  }
}

TEST_P(ExchangeTest, LogSumsFarFromZero) {
  Problem p = RandomProblem(4, 5, 8, runner_.ranks(), 29);
  for (const float shift : {1e4f, -1e4f}) {
    Problem far = p;
    // Whole numbers apart, so that fp32 holds them exactly next to the shift.
    for (Shard& s : far.shards) {
      for (float& x : s.lse) x = std::round(x) + shift;
    }
    // Without sinks: an LSE this large no longer holds the fraction that a sink is compared with.
    for (const Placement placement : kPlacements) {
      for (const Strategy strategy : kStrategies) {
        ExpectRight(runner_, far, {.strategy = strategy, .placement = placement});
      }
    }
  }
}

TEST_P(ExchangeTest, GatherSlicesUndoesScattering) {
  const Problem p = RandomProblem(4, 7, 16, runner_.ranks(), 31);
  const Result whole = runner_.Run(p, {});
  const ExchangeShape shape{p.rows, p.heads, p.value_dim, runner_.ranks()};
  std::vector<float> o(p.o_size(), kPoison), lse(p.lse_size(), kPoison);
  for (const bool with_lse : {true, false}) {
    OnEveryRank(runner_.ranks(), [&](int rank) {
      const HeadSlice slice = SliceOfRank(p.heads, runner_.ranks(), rank);
      std::vector<float> slice_o, slice_lse;
      for (int32_t row = 0; row < p.rows; ++row) {
        for (int32_t h = slice.begin; h < slice.begin + slice.count; ++h) {
          const size_t at = static_cast<size_t>(row) * p.heads + h;
          slice_lse.push_back(whole.lse[at]);
          slice_o.insert(slice_o.end(), &whole.o[at * p.value_dim],
                         &whole.o[(at + 1) * p.value_dim]);
        }
      }
      const Status s =
          GatherSlices(slice_o.data(), with_lse ? slice_lse.data() : nullptr, shape,
                       runner_.comm(rank), runner_.workspace(rank), rank == 0 ? o.data() : nullptr,
                       rank == 0 && with_lse ? lse.data() : nullptr, Far());
      EXPECT_TRUE(s.ok()) << Text(s);
    });
    ExpectEqual(o, whole.o, "o");
    ExpectEqual(lse, whole.lse, "lse");
    o.assign(o.size(), kPoison);
  }
}

TEST_P(ExchangeTest, PassesTheCommunicatorsErrorOn) {
  const Problem p = RandomProblem(4, 8, 16, runner_.ranks(), 37);
  if (runner_.ranks() == 1) GTEST_SKIP() << "a group of one exchanges nothing";
  runner_.comm(0).Abort("for the test");
  std::vector<float> out(p.o_size());
  for (const Placement placement : kPlacements) {
    for (const Strategy strategy : kStrategies) {
      const Status s = ExchangeAndMerge({.o = p.shards[0].o.data(),
                                         .lse = p.shards[0].lse.data(),
                                         .rows = p.rows,
                                         .heads = p.heads,
                                         .value_dim = p.value_dim,
                                         .placement = placement,
                                         .strategy = strategy,
                                         .out = out.data()},
                                        runner_.comm(0), runner_.workspace(0), Far());
      EXPECT_EQ(s.code(), StatusCode::kAborted) << Text(s);
    }
  }
  const Status s =
      GatherSlices(p.shards[0].o.data(), nullptr, {p.rows, p.heads, p.value_dim, runner_.ranks()},
                   runner_.comm(0), runner_.workspace(0), out.data(), nullptr, Far());
  EXPECT_EQ(s.code(), StatusCode::kAborted) << Text(s);
}

INSTANTIATE_TEST_SUITE_P(Groups, ExchangeTest, testing::ValuesIn(AllGroups()), ParamName);

// ---------------------------------------------------------------------------------------------
// Refusals

TEST(ExchangeRefusal, NamesTheFieldAndEntersNothing) {
  Group group = MakeGroup(Kind::kInProcess, 1);
  ExchangeWorkspace workspace;
  std::vector<float> o(64), lse(8), out(64);
  const ExchangeParams good{
      .o = o.data(), .lse = lse.data(), .rows = 2, .heads = 4, .value_dim = 8, .out = out.data()};
  struct Case {
    const char* field;
    std::function<void(ExchangeParams&)> spoil;
  };
  for (const Case& c : std::initializer_list<Case>{
           {"o is null", [](ExchangeParams& p) { p.o = nullptr; }},
           {"lse is null", [](ExchangeParams& p) { p.lse = nullptr; }},
           {"out is null", [](ExchangeParams& p) { p.out = nullptr; }},
           {"rows", [](ExchangeParams& p) { p.rows = -1; }},
           {"heads", [](ExchangeParams& p) { p.heads = -1; }},
           {"value_dim", [](ExchangeParams& p) { p.value_dim = 0; }},
       }) {
    ExchangeParams p = good;
    c.spoil(p);
    const Status s = ExchangeAndMerge(p, *group[0], workspace, Far());
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << c.field;
    EXPECT_THAT(s.message(), HasSubstr(c.field));
  }
  EXPECT_TRUE(ExchangeAndMerge(good, *group[0], workspace, Far()).ok());

  const Status s = GatherSlices(o.data(), lse.data(), {2, 4, 8, 3}, *group[0], workspace,
                                out.data(), nullptr, Far());
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(s.message(), HasSubstr("ranks"));
}

// ---------------------------------------------------------------------------------------------
// Traffic

// Counts what a rank sends to others.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(Communicator& comm) : comm_(comm) {}

  size_t sent() const { return sent_; }

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  uint64_t epoch() const override { return comm_.epoch(); }
  Status AllGather(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    sent_ += (size() - 1) * bytes;
    return comm_.AllGather(send, recv, bytes, deadline);
  }
  Status AllToAll(const void* send, void* recv, size_t bytes, Deadline deadline) override {
    sent_ += (size() - 1) * bytes;
    return comm_.AllToAll(send, recv, bytes, deadline);
  }
  Status ReduceScatter(const float* send, float* recv, size_t count, Deadline deadline) override {
    sent_ += (size() - 1) * count * sizeof(float);
    return comm_.ReduceScatter(send, recv, count, deadline);
  }
  Status Gather(const void* send, void* recv, size_t bytes, int root, Deadline deadline) override {
    if (rank() != root) sent_ += bytes;
    return comm_.Gather(send, recv, bytes, root, deadline);
  }
  Status Pass(const void* send, void* recv, size_t bytes, int from, int to,
              Deadline deadline) override {
    if (rank() == from) sent_ += bytes;
    return comm_.Pass(send, recv, bytes, from, to, deadline);
  }
  Status Barrier(Deadline deadline) override { return comm_.Barrier(deadline); }
  void Abort(const std::string& reason) override { comm_.Abort(reason); }

 private:
  Communicator& comm_;
  size_t sent_ = 0;
};

TEST(BytesSent, IsWhatTheLastRankSends) {
  for (const int ranks : {1, 2, 3, 8}) {
    Group group = MakeGroup(Kind::kInProcess, ranks);
    for (const int32_t heads : {0, 2, 8, 13}) {
      const Problem p = RandomProblem(3, heads, 16, ranks, 41);
      for (const Placement placement : kPlacements) {
        for (const Strategy strategy :
             {Strategy::kAuto, Strategy::kAllGather, Strategy::kAgRs, Strategy::kA2a}) {
          size_t sent = 0;
          OnEveryRank(ranks, [&](int rank) {
            CountingCommunicator comm(*group[rank]);
            ExchangeWorkspace workspace;
            std::vector<float> out(p.o_size() + 1);
            const Status s = ExchangeAndMerge({.o = p.shards[rank].o.data(),
                                               .lse = p.shards[rank].lse.data(),
                                               .rows = p.rows,
                                               .heads = p.heads,
                                               .value_dim = p.value_dim,
                                               .placement = placement,
                                               .strategy = strategy,
                                               .out = out.data()},
                                              comm, workspace, Far());
            EXPECT_TRUE(s.ok()) << Text(s);
            if (rank == ranks - 1) sent = comm.sent();
          });
          EXPECT_EQ(BytesSent({p.rows, heads, 16, ranks, placement}, strategy), sent)
              << Name(strategy) << " " << Name(placement) << ", " << ranks << " ranks, " << heads
              << " heads";
        }
      }
    }
  }
}

}  // namespace
}  // namespace tributary::collective
