// A refusal names the field, has the right code and leaves everything as it was.
#include "kernels/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "kernels/cpu/backend.h"
#include "tests/kernels/attention_case.h"

namespace tributary::test {
namespace {

using ::testing::Each;
using ::testing::StartsWith;

constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
constexpr StatusCode kUnsupported = StatusCode::kFailedPrecondition;

template <typename Params>
struct Breakage {
  const char* field;  // what the message begins with
  StatusCode code;
  std::function<void(Params&)> apply;
};

TEST(ValidateTest, Attention) {
  static const float kBadScales[2] = {1.0f, -1.0f};
  static const KeyRange kNegative[2] = {{-1, 5}, {0, 1}};
  static const KeyRange kTooFar[2] = {{0, 1}, {0, 1000}};
  static const int32_t kWild[8] = {0, kWildPage, 0, 0, 0, 0, 0, 0};
  static const AttentionEntry kWildEntry[1] = {{0, 2, kWild}};
  static const AttentionEntry kGap[1] = {{1, 1, kWild}};
  static const AttentionEntry kShort[1] = {{0, 1, {}}};
  static const AttentionEntry kCountBelowZero[1] = {{0, -1, {}}};
  using P = AttentionParams;
  const std::vector<Breakage<P>> breakages = {
      {"kv.page_size: 24", kInvalid, [](P& p) { p.kv.page_size = 24; }},
      {"kv.num_pages: -1", kInvalid, [](P& p) { p.kv.num_pages = -1; }},
      {"kv.kv_heads: 0", kInvalid, [](P& p) { p.kv.geometry.kv_heads = 0; }},
      {"kv.key_dim: 0", kInvalid, [](P& p) { p.kv.geometry.key_dim = 0; }},
      {"kv.value_dim: 0", kInvalid, [](P& p) { p.kv.geometry.value_dim = 0; }},
      {"kv.key_dim: 112", kUnsupported, [](P& p) { p.kv.geometry.key_dim = 112; }},
      {"kv.dtype: unknown", kInvalid, [](P& p) { p.kv.geometry.dtype = static_cast<DType>(77); }},
      {"kv.base", kInvalid, [](P& p) { p.kv.base = nullptr; }},
      {"kv.k_scale[1]", kInvalid, [](P& p) { p.kv.k_scale = kBadScales; }},
      {"kv.v_scale[1]", kInvalid, [](P& p) { p.kv.v_scale = kBadScales; }},
      {"q_dtype: fp8_e4m3", kInvalid, [](P& p) { p.q_dtype = DType::kFp8E4M3; }},
      {"rows: -1", kInvalid, [](P& p) { p.rows = -1; }},
      {"q_heads: 0", kInvalid, [](P& p) { p.q_heads = 0; }},
      {"q_heads: 7", kInvalid, [](P& p) { p.q_heads = 7; }},
      {"q_heads: 17", kUnsupported, [](P& p) { p.q_heads = 34; }},
      {"sm_scale", kInvalid, [](P& p) { p.sm_scale = std::nanf(""); }},
      {"soft_cap", kInvalid, [](P& p) { p.soft_cap = -1.0f; }},
      {"soft_cap", kInvalid, [](P& p) { p.soft_cap = std::numeric_limits<float>::infinity(); }},
      {"entries[0].row_begin: 1", kInvalid, [](P& p) { p.entries = kGap; }},
      {"entries[0].row_count: -1", kInvalid, [](P& p) { p.entries = kCountBelowZero; }},
      {"entries: cover 1 rows of 2", kInvalid, [](P& p) { p.entries = kShort; }},
      {"q: is null", kInvalid, [](P& p) { p.q = nullptr; }},
      {"keys: is null", kInvalid, [](P& p) { p.keys = nullptr; }},
      {"o: is null", kInvalid, [](P& p) { p.o = nullptr; }},
      {"lse: is null", kInvalid, [](P& p) { p.lse = nullptr; }},
      {"keys[0].lo: -1", kInvalid, [](P& p) { p.keys = kNegative; }},
      {"keys[1].hi: 1000", kInvalid, [](P& p) { p.keys = kTooFar; }},
      {"entries[0].pages[1]: 2147480000", kInvalid, [](P& p) { p.entries = kWildEntry; }},
  };
  cpu::ThreadPool pool(1);
  for (const auto& breakage : breakages) {
    AttentionCase c({}, {CausalRows(40, 2)});
    std::fill(c.o.begin(), c.o.end(), 42.0f);
    std::fill(c.lse.begin(), c.lse.end(), 42.0f);
    AttentionParams p = c.params();
    breakage.apply(p);
    const Status status = cpu::Attention(p, pool);
    EXPECT_EQ(status.code(), breakage.code) << breakage.field;
    EXPECT_THAT(status.message(), StartsWith(breakage.field));
    EXPECT_THAT(c.o, Each(42.0f)) << breakage.field;
    EXPECT_THAT(c.lse, Each(42.0f)) << breakage.field;
  }
}

TEST(ValidateTest, DeadPagesAreNotLookedAt) {
  cpu::ThreadPool pool(1);
  AttentionCase c({}, {{{100, 120}, {400, 401}}});  // the table is wild everywhere else
  EXPECT_TRUE(cpu::Attention(c.params(), pool).ok());
}

TEST(ValidateTest, NoRowsNeedNoTensors) {
  cpu::ThreadPool pool(1);
  AttentionCase c({}, {CausalRows(40, 2)});
  AttentionParams p = c.params();
  p.rows = 0;
  p.entries = {};
  p.q = nullptr;
  p.keys = nullptr;
  p.o = p.lse = nullptr;
  EXPECT_TRUE(cpu::Attention(p, pool).ok());
}

TEST(ValidateTest, Append) {
  using P = AppendParams;
  static const int64_t kBeyond[2] = {0, 4 * 16};
  static const int64_t kBelow[2] = {0, -2};
  const std::vector<Breakage<P>> breakages = {
      {"kv.page_size: 0", kInvalid, [](P& p) { p.kv.page_size = 0; }},
      {"input_dtype: fp8_e5m2", kInvalid, [](P& p) { p.input_dtype = DType::kFp8E5M2; }},
      {"tokens: -1", kInvalid, [](P& p) { p.tokens = -1; }},
      {"k: is null", kInvalid, [](P& p) { p.k = nullptr; }},
      {"v: is null", kInvalid, [](P& p) { p.v = nullptr; }},
      {"slots: is null", kInvalid, [](P& p) { p.slots = nullptr; }},
      {"slots[1]: 64", kInvalid, [](P& p) { p.slots = kBeyond; }},
      {"slots[1]: -2", kInvalid, [](P& p) { p.slots = kBelow; }},
  };
  cpu::ThreadPool pool(1);
  for (const auto& breakage : breakages) {
    std::vector<std::byte> memory;
    const std::vector<std::byte> input = RandomTensor(DType::kF32, 2 * 64, 1);
    const int64_t slots[2] = {0, 1};
    AppendParams p;
    p.kv = {.num_pages = 4, .page_size = 16, .geometry = SquareGeometry(1, 64, DType::kBf16)};
    memory.assign(4 * PageBytes(p.kv), std::byte{0x11});
    p.kv.base = memory.data();
    p.k = p.v = input.data();
    p.input_dtype = DType::kF32;
    p.tokens = 2;
    p.slots = slots;
    breakage.apply(p);
    uint8_t matches[2] = {9, 9};
    for (const Status& status : {cpu::Append(p, pool), cpu::MatchesCache(p, pool, matches)}) {
      EXPECT_EQ(status.code(), breakage.code) << breakage.field;
      EXPECT_THAT(status.message(), StartsWith(breakage.field));
    }
    EXPECT_THAT(memory, Each(std::byte{0x11})) << breakage.field;
    EXPECT_THAT(matches, Each(9));
  }
}

TEST(ValidateTest, NewTokens) {
  using P = NewTokensParams;
  static const KeyRange kBeyond[2] = {{0, 1}, {0, 3}};
  static const KeyRange kBelow[2] = {{-1, 1}, {0, 1}};
  static const NewTokensEntry kShort[1] = {{0, 1}};
  const std::vector<Breakage<P>> breakages = {
      {"q_dtype: fp8_e4m3", kInvalid, [](P& p) { p.q_dtype = DType::kFp8E4M3; }},
      {"kv_dtype: fp8_e4m3", kInvalid, [](P& p) { p.kv_dtype = DType::kFp8E4M3; }},
      {"rows: -5", kInvalid, [](P& p) { p.rows = -5; }},
      {"kv_heads: 0", kInvalid, [](P& p) { p.kv_heads = 0; }},
      {"q_heads: 3", kInvalid, [](P& p) { p.q_heads = 3; }},
      {"q_heads: 18", kUnsupported, [](P& p) { p.q_heads = 36; }},
      {"key_dim: 112", kUnsupported, [](P& p) { p.key_dim = 112; }},
      {"head_begin: -1", kInvalid, [](P& p) { p.head_begin = -1; }},
      {"head_count: 4", kInvalid, [](P& p) { p.head_begin = 1; }},
      {"sm_scale", kInvalid, [](P& p) { p.sm_scale = std::nanf(""); }},
      {"entries: cover 1 rows of 2", kInvalid, [](P& p) { p.entries = kShort; }},
      {"q: is null", kInvalid, [](P& p) { p.q = nullptr; }},
      {"k: is null", kInvalid, [](P& p) { p.k = nullptr; }},
      {"v: is null", kInvalid, [](P& p) { p.v = nullptr; }},
      {"keys: is null", kInvalid, [](P& p) { p.keys = nullptr; }},
      {"o: is null", kInvalid, [](P& p) { p.o = nullptr; }},
      {"lse: is null", kInvalid, [](P& p) { p.lse = nullptr; }},
      {"keys[1].hi: 3", kInvalid, [](P& p) { p.keys = kBeyond; }},
      {"keys[0].lo: -1", kInvalid, [](P& p) { p.keys = kBelow; }},
  };
  cpu::ThreadPool pool(1);
  for (const auto& breakage : breakages) {
    const std::vector<std::byte> data = RandomTensor(DType::kF32, 2 * 4 * 64, 1);
    std::vector<float> o(2 * 4 * 64, 42.0f), lse(2 * 4, 42.0f);
    const KeyRange keys[2] = {{0, 1}, {0, 2}};
    const NewTokensEntry entry[1] = {{0, 2}};
    NewTokensParams p;
    p.q = p.k = p.v = data.data();
    p.q_dtype = p.kv_dtype = DType::kF32;
    p.rows = 2;
    p.q_heads = p.head_count = 4;
    p.kv_heads = 2;
    p.key_dim = p.value_dim = 64;
    p.entries = entry;
    p.keys = keys;
    p.o = o.data();
    p.lse = lse.data();
    breakage.apply(p);
    const Status status = cpu::NewTokens(p, pool);
    EXPECT_EQ(status.code(), breakage.code) << breakage.field;
    EXPECT_THAT(status.message(), StartsWith(breakage.field));
    EXPECT_THAT(o, Each(42.0f)) << breakage.field;
    EXPECT_THAT(lse, Each(42.0f)) << breakage.field;
  }
}

TEST(ValidateTest, Merge) {
  using P = MergeParams;
  static const float* const kNulls[2] = {nullptr, nullptr};
  const std::vector<Breakage<P>> breakages = {
      {"rows: -1", kInvalid, [](P& p) { p.rows = -1; }},
      {"heads: -1", kInvalid, [](P& p) { p.heads = -1; }},
      {"value_dim: -1", kInvalid, [](P& p) { p.value_dim = -1; }},
      {"o: has no sources", kInvalid, [](P& p) { p.o = {}; }},
      {"lse: has 1 sources where o has 2", kInvalid, [](P& p) { p.lse = p.lse.first(1); }},
      {"o[0]: is null", kInvalid, [](P& p) { p.o = kNulls; }},
      {"lse[0]: is null", kInvalid, [](P& p) { p.lse = kNulls; }},
      {"out: is null", kInvalid, [](P& p) { p.out = nullptr; }},
  };
  cpu::ThreadPool pool(1);
  for (const auto& breakage : breakages) {
    const std::vector<float> source(64, 1.0f);
    std::vector<float> out(64, 42.0f);
    const float* const sources[2] = {source.data(), source.data()};
    MergeParams p;
    p.o = p.lse = sources;
    p.rows = p.heads = 1;
    p.value_dim = 64;
    p.out = out.data();
    breakage.apply(p);
    const Status status = cpu::MergePartials(p, pool);
    EXPECT_EQ(status.code(), breakage.code) << breakage.field;
    EXPECT_THAT(status.message(), StartsWith(breakage.field));
    EXPECT_THAT(out, Each(42.0f)) << breakage.field;
  }
}

}  // namespace
}  // namespace tributary::test
