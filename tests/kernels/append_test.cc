// Append and MatchesCache against the reference, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "kernels/cpu/backend.h"
#include "kernels/head_dims.h"
#include "kernels/reference.h"
#include "tests/kernels/attention_case.h"
#include "tests/kernels/dispatch.h"

namespace tributary::test {
namespace {

// A cache full of a pattern, and tokens for every third slot or so.
struct AppendCase {
  AppendCase(DType cache, DType input, HeadDims dims, int32_t page_size) {
    p.kv.num_pages = 5;
    p.kv.page_size = page_size;
    p.kv.geometry = {
        .kv_heads = 3, .key_dim = dims.key_dim, .value_dim = dims.value_dim, .dtype = cache};
    p.kv.k_scale = k_scale;
    p.kv.v_scale = v_scale;
    memory.assign(p.kv.num_pages * PageBytes(p.kv), std::byte{0x55});
    p.kv.base = memory.data();
    slots.resize(p.kv.num_pages * page_size);
    std::iota(slots.begin(), slots.end(), 0);
    std::mt19937 generator(page_size);
    std::shuffle(slots.begin(), slots.end(), generator);
    slots.resize(slots.size() / 3);
    slots[1] = slots[4] = kPadSlot;
    const size_t heads = slots.size() * p.kv.geometry.kv_heads;
    k = RandomTensor(input, heads * dims.key_dim, 1, 100.0f);
    v = RandomTensor(input, heads * dims.value_dim, 2, 0.01f);
    StoreElement(input, k.data(), 5, std::numeric_limits<float>::quiet_NaN());
    StoreElement(input, k.data(), 6, std::numeric_limits<float>::infinity());
    p.input_dtype = input;
    p.k = k.data();
    p.v = v.data();
    p.tokens = static_cast<int32_t>(slots.size());
    p.slots = slots.data();
  }
  AppendCase(const AppendCase&) = delete;
  AppendCase& operator=(const AppendCase&) = delete;

  const float k_scale[3] = {1.0f, 0.3f, 2.5f};
  const float v_scale[3] = {0.001f, 1.0f, 0.7f};
  std::vector<std::byte> memory, k, v;
  std::vector<int64_t> slots;
  AppendParams p;
};

class AppendTest : public ::testing::TestWithParam<int64_t> {
 protected:
  ForcedTarget target_{GetParam()};
  cpu::ThreadPool pool_{2};
};
INSTANTIATE_TEST_SUITE_P(Targets, AppendTest, ::testing::ValuesIn(Targets()), TargetName);

TEST_P(AppendTest, WritesWhatTheReferenceWritesAndNothingElse) {
  for (const DType cache :
       {DType::kBf16, DType::kF16, DType::kFp8E4M3, DType::kFp8E5M2, DType::kF32, DType::kNvfp4}) {
    for (const DType input : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (const HeadDims& dims : kHeadDims) {
        for (const int32_t page_size : {16, 128}) {
          AppendCase c(cache, input, dims, page_size);
          std::vector<std::byte> expected =
              c.memory;  // the same half bytes throughout, in any order
          AppendParams reference = c.p;
          reference.kv.base = expected.data();
          ReferenceAppend(reference);
          const Status status = cpu::Append(c.p, pool_);
          ASSERT_TRUE(status.ok()) << status.message();
          EXPECT_TRUE(c.memory == CpuOrder(c.p.kv, expected, std::byte{0x55}))
              << Name(input) << " to " << Name(cache) << ", "
              << HeadDimsName(dims.key_dim, dims.value_dim) << ", " << page_size;
        }
      }
    }
  }
}

TEST_P(AppendTest, MatchesCacheTellsARepetitionFromAnotherToken) {
  for (const DType cache : {DType::kBf16, DType::kFp8E4M3, DType::kF32, DType::kNvfp4}) {
    AppendCase c(cache, DType::kF32, {64, 64}, 16);
    std::vector<uint8_t> matches(c.p.tokens, 7);
    ASSERT_TRUE(cpu::MatchesCache(c.p, pool_, matches.data()).ok());
    for (int32_t t = 0; t < c.p.tokens; ++t) EXPECT_EQ(matches[t], c.slots[t] == kPadSlot) << t;

    ASSERT_TRUE(cpu::Append(c.p, pool_).ok());
    ASSERT_TRUE(cpu::MatchesCache(c.p, pool_, matches.data()).ok());
    for (int32_t t = 0; t < c.p.tokens; ++t) EXPECT_EQ(matches[t], 1) << t;

    // One element of one value of one head.
    const size_t changed = 7;
    StoreElement(DType::kF32, c.v.data(), (changed * 3 + 2) * 64 + 63, 1000.0f);
    ASSERT_TRUE(cpu::MatchesCache(c.p, pool_, matches.data()).ok());
    for (int32_t t = 0; t < c.p.tokens; ++t) EXPECT_EQ(matches[t], t == int(changed) ? 0 : 1) << t;
  }
}

TEST_P(AppendTest, NoTokensIsNothingToDo) {
  AppendCase c(DType::kBf16, DType::kBf16, {64, 64}, 16);
  const std::vector<std::byte> before = c.memory;
  c.p.tokens = 0;
  c.p.k = c.p.v = nullptr;
  c.p.slots = nullptr;
  EXPECT_TRUE(cpu::Append(c.p, pool_).ok());
  EXPECT_TRUE(cpu::MatchesCache(c.p, pool_, nullptr).ok());
  EXPECT_TRUE(c.memory == before);
}

}  // namespace
}  // namespace tributary::test
