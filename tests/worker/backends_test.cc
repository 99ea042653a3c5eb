#include "worker/backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/worker/test_host.h"

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Backends, EveryDeviceOffersEveryValidCausalCache) {
  CacheSpec spec = testing::SmallSpec();
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    for (const int32_t dim : {64, 128, 256}) {
      for (const DType kv :
           {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16, DType::kNvfp4}) {
        spec.head_dim = dim;
        spec.kv_dtype = kv;
        spec.q_heads = 16 * spec.kv_heads;
        spec.soft_cap = 30;
        spec.layers[0].window.left = 4;
        spec.layers[0].sinks.assign(32, 0.0f);
        spec.fp8_queries = IsFp8(kv);
        const Selection selection =
            SelectBackend(spec, {.device = device, .batch_invariant = true});
        ASSERT_TRUE(selection.ok()) << selection.refusals[0];
        EXPECT_EQ(selection.backend->name, Name(device));
        EXPECT_THAT(selection.refusals, IsEmpty());
      }
    }
  }
}

TEST(Backends, OnlyTheCpuOffersCachesOfF32) {
  CacheSpec spec = testing::SmallSpec();
  spec.kv_dtype = DType::kF32;
  EXPECT_TRUE(SelectBackend(spec, {.device = Device::kCpu, .batch_invariant = true}).ok());
  const Selection selection = SelectBackend(spec, {.device = Device::kCuda});
  EXPECT_FALSE(selection.ok());
  EXPECT_THAT(selection.refusals[0], HasSubstr("kv_dtype f32 is not offered"));
}

TEST(Backends, TheCpuOffersEveryDflashMask) {
  CacheSpec spec = testing::SmallSpec();
  spec.layers.assign(2, {});
  spec.layers[0].window = {4, 4};
  spec.layers[0].window_base = WindowBase::kAnchor;
  spec.layers[0].sinks.assign(4, 0.0f);
  spec.layers[0].kv_dtype = DType::kFp8E4M3;
  spec.layers[1].causal_block = true;
  spec.layers[1].soft_cap = 3.0f;
  const BackendNeeds needs{.device = Device::kCpu, .mode = AttentionMode::kDflash};
  EXPECT_TRUE(SelectBackend(spec, needs).ok());
  // What only DFlash looks at is no reason against causal attention, and the reverse.
  BackendCapabilities narrow = CpuBackend();
  narrow.kv_dtypes = {DType::kBf16};
  narrow.modes = {{.mode = AttentionMode::kCausal, .left_window = true, .sinks = true},
                  {.mode = AttentionMode::kDflash}};
  EXPECT_THAT(WhyNot(narrow, spec, {.device = Device::kCpu}),
              ElementsAre(HasSubstr("fp8_e4m3"), HasSubstr("soft_cap")));
  EXPECT_THAT(WhyNot(narrow, spec, needs),
              ElementsAre(HasSubstr("fp8_e4m3"), HasSubstr("sliding"), HasSubstr("right side"),
                          HasSubstr("anchor"), HasSubstr("causal blocks"), HasSubstr("soft_cap"),
                          HasSubstr("sinks")));
}

TEST(Backends, EveryBackendSaysWhyNot) {
  CacheSpec spec = testing::SmallSpec();
  spec.head_dim = 112;
  const Selection selection = SelectBackend(spec, {.device = Device::kCpu});
  EXPECT_FALSE(selection.ok());
  EXPECT_THAT(selection.refusals,
              ElementsAre("cuda: the workers' device is cpu, head_dim 112 is not offered",
                          "cpu: head_dim 112 is not offered"));
}

TEST(Backends, EveryLackIsAReason) {
  BackendCapabilities narrow;
  narrow.name = "narrow";
  CacheSpec spec = testing::SmallSpec();
  spec.soft_cap = 1;
  spec.layers[0].window.left = 1;
  spec.layers[0].sinks.assign(4, 0.0f);
  spec.fp8_queries = true;
  EXPECT_THAT(
      WhyNot(narrow, spec, {.device = Device::kCuda, .batch_invariant = true}),
      ElementsAre(HasSubstr("device"), HasSubstr("mode"), HasSubstr("head_dim"),
                  HasSubstr("page_size"), HasSubstr("kv_dtype"), HasSubstr("query heads"),
                  HasSubstr("window"), HasSubstr("soft_cap"), HasSubstr("sinks"),
                  HasSubstr("log-sum-exp"), HasSubstr("batch"), HasSubstr("queries in FP8")));
}

TEST(Backends, TheFirstThatFitsIsTaken) {
  BackendCapabilities narrow;
  narrow.name = "narrow";
  BackendCapabilities other = CpuBackend();
  other.name = "other";
  const std::array<const BackendCapabilities*, 3> backends = {&narrow, &other, &CpuBackend()};
  const Selection chosen = SelectBackend(backends, testing::SmallSpec(), {});
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ(chosen.backend->name, "other");
}

TEST(Backends, ACacheRemembersTheBackendOfEachMode) {
  BackendCapabilities blocks = CpuBackend();
  blocks.name = "blocks";
  blocks.modes = {{.mode = AttentionMode::kDflash}};
  BackendCapabilities causal = CpuBackend();
  causal.name = "causal";
  causal.modes = {{.mode = AttentionMode::kCausal}};
  const std::array<const BackendCapabilities*, 2> both = {&blocks, &causal};
  const std::array<const BackendCapabilities*, 1> one = {&blocks};
  const CacheSpec spec = testing::SmallSpec();
  const CacheBackends chosen(both, spec, {});
  EXPECT_EQ(chosen.of(AttentionMode::kCausal).backend, &causal);
  EXPECT_EQ(chosen.of(AttentionMode::kDflash).backend, &blocks);
  EXPECT_EQ(chosen.first(), &causal);

  const CacheBackends blocks_only(one, spec, {});
  EXPECT_THAT(blocks_only.of(AttentionMode::kCausal).refusals,
              ElementsAre("blocks: mode CAUSAL is not offered"));
  EXPECT_EQ(blocks_only.first(), &blocks);
  EXPECT_EQ(CacheBackends(both, spec, {.device = Device::kCuda}).first(), nullptr);
}

TEST(Backends, DevicesAreParsedByName) {
  Device device = Device::kCpu;
  EXPECT_TRUE(Parse("cuda", &device));
  EXPECT_EQ(device, Device::kCuda);
  EXPECT_FALSE(Parse("gpu", &device));
  EXPECT_FALSE(Parse("", &device));
  EXPECT_EQ(device, Device::kCuda);
}

}  // namespace
}  // namespace tributary::worker
