#include "worker/cache_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/status/errors.h"
#include "kernels/head_dims.h"
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
    {"HeadDim", "head_dim", [](CacheSpec& s) { s.head_dim = 112; }},
    {"ValueHeadDim", "value_head_dim", [](CacheSpec& s) { s.value_head_dim = 128; }},
    {"HeadDimOfALayer", "layer_specs[0].head_dim",
     [](CacheSpec& s) { s.layers[0].head_dim = 112; }},
    {"ValueHeadDimOfALayer", "layer_specs[0].value_head_dim",
     [](CacheSpec& s) { s.layers[0].value_head_dim = 96; }},
    {"QHeadsOfALayer", "layer_specs[0].q_heads", [](CacheSpec& s) { s.layers[0].q_heads = 3; }},
    {"KvHeadsOfALayer", "layer_specs[0].kv_heads", [](CacheSpec& s) { s.layers[0].kv_heads = -1; }},
    {"ScaleOfALayer", "layer_specs[0].sm_scale", [](CacheSpec& s) { s.layers[0].sm_scale = -1; }},
    {"SinksOfALayersOwnHeads", "layer_specs[0].sinks",
     [](CacheSpec& s) {
       s.layers[0].q_heads = 8;
       s.layers[0].sinks = {0, 0, 0, 0};
     }},
    {"PageSize", "page_size", [](CacheSpec& s) { s.page_size = 24; }},
    {"ZeroInterleave", "interleave", [](CacheSpec& s) { s.interleave = 0; }},
    {"InterleaveThatDoesNotDivide", "interleave", [](CacheSpec& s) { s.interleave = 6; }},
    {"InterleaveBeyondAPage", "interleave", [](CacheSpec& s) { s.interleave = 32; }},
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
    {"Fp8WeightsWithoutFp8Queries", "fp8_weights", [](CacheSpec& s) { s.fp8_weights = true; }},
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
    {"ZeroOScale", "layer_specs[0].o_scale", [](CacheSpec& s) { s.layers[0].o_scale = 0; }},
    {"NanOScale", "layer_specs[0].o_scale", [](CacheSpec& s) { s.layers[0].o_scale = kNan; }},
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

TEST(CacheSpec, ServesAsManyKvHeadsAsTheLimitsTell) {
  CacheSpec spec = testing::SmallSpec();
  const auto with = [&spec](int32_t kv_heads) {
    spec.kv_heads = spec.q_heads = kv_heads;
    for (LayerSpec& layer : spec.layers) {
      layer.k_scale.assign(kv_heads, 1.0f);
      layer.v_scale.assign(kv_heads, 1.0f);
    }
    return ValidateCacheSpec(spec);
  };
  EXPECT_TRUE(with(1024).ok()) << with(1024);
  const absl::Status beyond = with(1025);
  EXPECT_EQ(FieldOf(beyond), "kv_heads");
  EXPECT_THAT(beyond.message(), ::testing::HasSubstr("1024"));
}

TEST(CacheSpec, EveryRowOfTheTableOfHeadDimsIsFine) {
  for (const HeadDims& dims : kHeadDims) {
    CacheSpec spec = testing::SmallSpec();
    spec.head_dim = dims.key_dim;
    spec.value_head_dim = dims.value_dim;
    EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << HeadDimsName(dims.key_dim, dims.value_dim);
  }
}

TEST(CacheSpec, ALayersOwnHeadsAndDimsComeBeforeTheCaches) {
  CacheSpec spec = testing::SmallSpec();
  spec.head_dim = 192;
  spec.value_head_dim = 128;
  LayerSpec layer;
  EXPECT_EQ(
      GeometryOf(spec, layer),
      (LayerGeometry{.q_heads = 4,
                     .kv = {.kv_heads = 2, .key_dim = 192, .value_dim = 128, .dtype = DType::kBf16},
                     .sm_scale = 0.125f}));
  layer.head_dim = 96;  // and values of as many dims
  layer.q_heads = 12;
  layer.kv_heads = 3;
  layer.sm_scale = 0.5f;
  layer.kv_dtype = DType::kF16;
  const LayerGeometry own{
      .q_heads = 12, .kv = SquareGeometry(3, 96, DType::kF16), .sm_scale = 0.5f};
  EXPECT_EQ(GeometryOf(spec, layer), own);

  CacheSpec other = spec;
  spec.layers = {layer};
  EXPECT_FALSE(SameSpec(spec, other));
  other.layers = {layer};
  EXPECT_TRUE(SameSpec(spec, other));
  other.layers[0].value_head_dim = 96;  // as it is without
  EXPECT_TRUE(SameSpec(spec, other));
}

TEST(CacheSpec, ShardBytesAreThoseOfAllPages) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.resize(3);
  // K and V x heads x slots x dim x bytes, times pages, times layers.
  EXPECT_EQ(*ShardBytes(spec), size_t{2 * 2 * 16 * 64 * 2} * 64 * 3);
  spec.kv_dtype = DType::kFp8E4M3;
  EXPECT_EQ(*ShardBytes(spec), size_t{2 * 2 * 16 * 64} * 64 * 3);
  // Keys of 80 bytes take 96; values do not.
  spec.layers[1].head_dim = 80;
  EXPECT_EQ(*ShardBytes(spec), size_t{2 * 16} * (128 + 96 + 80 + 128) * 64);
  spec.layers[2].head_dim = 192;
  spec.layers[2].value_head_dim = 128;
  spec.layers[2].kv_heads = 1;
  EXPECT_EQ(*ShardBytes(spec), size_t{16} * (2 * 128 + 2 * (96 + 80) + 192 + 128) * 64);
}

}  // namespace
}  // namespace tributary::worker
