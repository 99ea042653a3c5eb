#include "worker/cache_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/status/errors.h"
#include "tests/worker/test_host.h"

namespace tributary::worker {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  const char* name;
  const char* field;
  std::function<void(CacheSpec&)> spoil;
};

class BadSpec : public ::testing::TestWithParam<Case> {};

TEST_P(BadSpec, IsInvalidAndNamesTheField) {
  CacheSpec spec = testing::SmallSpec();
  ASSERT_TRUE(ValidateCacheSpec(spec).ok());
  GetParam().spoil(spec);
  const absl::Status status = ValidateCacheSpec(spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldOf(status), GetParam().field) << status;
}

const Case kCases[] = {
    {"NoLayers", "layers", [](CacheSpec& s) { s.layers.clear(); }},
    {"TooManyLayers", "layers", [](CacheSpec& s) { s.layers.resize(1025); }},
    {"NoKvHeads", "kv_heads", [](CacheSpec& s) { s.kv_heads = 0; }},
    {"HugeKvHeads", "kv_heads", [](CacheSpec& s) { s.kv_heads = s.q_heads = 1 << 30; }},
    {"NoQHeads", "q_heads", [](CacheSpec& s) { s.q_heads = 0; }},
    {"UnevenGroups", "q_heads", [](CacheSpec& s) { s.q_heads = 5; }},
    {"WideGroups", "q_heads", [](CacheSpec& s) { s.q_heads = 34; }},
    {"HeadDim", "head_dim", [](CacheSpec& s) { s.head_dim = 96; }},
    {"PageSize", "page_size", [](CacheSpec& s) { s.page_size = 24; }},
    {"ZeroInterleave", "interleave", [](CacheSpec& s) { s.interleave = 0; }},
    {"InterleaveThatDoesNotDivide", "interleave", [](CacheSpec& s) { s.interleave = 6; }},
    {"InterleaveBeyondAPage", "interleave", [](CacheSpec& s) { s.interleave = 32; }},
    {"FullFloatKv", "kv_dtype", [](CacheSpec& s) { s.kv_dtype = DType::kF32; }},
    {"UnknownKv", "kv_dtype", [](CacheSpec& s) { s.kv_dtype = static_cast<DType>(9); }},
    {"ZeroScale", "sm_scale", [](CacheSpec& s) { s.sm_scale = 0; }},
    {"NanScale", "sm_scale", [](CacheSpec& s) { s.sm_scale = kNan; }},
    {"NegativeSoftCap", "soft_cap", [](CacheSpec& s) { s.soft_cap = -1; }},
    {"InfiniteSoftCap", "soft_cap", [](CacheSpec& s) { s.soft_cap = kInf; }},
    {"Fp8QueriesWithoutFp8", "fp8_queries",
     [](CacheSpec& s) {
       s.kv_dtype = DType::kBf16;
       s.fp8_queries = true;
     }},
    {"NoPages", "capacity_tokens", [](CacheSpec& s) { s.num_pages = 0; }},
    {"BytesBeyond63Bits", "capacity_tokens",
     [](CacheSpec& s) {
       s.kv_heads = s.q_heads = 1024;
       s.head_dim = 256;
       s.page_size = 128;
       s.num_pages = INT32_MAX;
       s.layers.resize(1024);
     }},
    {"WindowLeft", "layer_specs[0].window.left",
     [](CacheSpec& s) { s.layers[0].window.left = -2; }},
    {"WindowRight", "layer_specs[0].window.right",
     [](CacheSpec& s) { s.layers[0].window.right = -7; }},
    {"SinksOfAnotherCount", "layer_specs[1].sinks",
     [](CacheSpec& s) {
       s.layers.resize(2);
       s.layers[1].sinks = {1.0f};
     }},
    {"NanSink", "layer_specs[0].sinks[2]",
     [](CacheSpec& s) {
       s.layers[0].sinks = {0, 0, kNan, 0};
     }},
    {"KScaleOfAnotherCount", "layer_specs[0].k_scale",
     [](CacheSpec& s) {
       s.layers[0].k_scale = {1, 1, 1};
     }},
    {"ZeroKScale", "layer_specs[0].k_scale[1]",
     [](CacheSpec& s) {
       s.layers[0].k_scale = {1, 0};
     }},
    {"NoVScale", "layer_specs[0].v_scale", [](CacheSpec& s) { s.layers[0].v_scale.clear(); }},
    {"InfiniteVScale", "layer_specs[0].v_scale[0]",
     [](CacheSpec& s) { s.layers[0].v_scale = {kInf}; }},
};

INSTANTIATE_TEST_SUITE_P(CacheSpec, BadSpec, ::testing::ValuesIn(kCases),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST(CacheSpec, LimitsThemselvesAreFine) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(1024);
  spec.q_heads = 16 * spec.kv_heads;
  spec.head_dim = 256;
  spec.page_size = 128;
  spec.interleave = 1;
  spec.layers[7].window.left = 0;
  EXPECT_TRUE(ValidateCacheSpec(spec).ok());
}

TEST(CacheSpec, ShardBytesAreThoseOfAllPages) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(3);
  // K and V x heads x slots x dim x bytes, times pages, times layers.
  EXPECT_EQ(*ShardBytes(spec), size_t{2 * 2 * 16 * 64 * 2} * 64 * 3);
  spec.kv_dtype = DType::kFp8E4M3;
  EXPECT_EQ(*ShardBytes(spec), size_t{2 * 2 * 16 * 64} * 64 * 3);
}

}  // namespace
}  // namespace tributary::worker
