#include "worker/backends.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/worker/test_host.h"

namespace tributary::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Backends, TheCpuOffersEveryValidCausalCache) {
  CacheSpec spec = testing::SmallSpec();
  for (const int32_t dim : {64, 128, 256}) {
    for (const DType kv : {DType::kFp8E4M3, DType::kFp8E5M2, DType::kBf16, DType::kF16}) {
      spec.head_dim = dim;
      spec.kv_dtype = kv;
      spec.q_heads = 16 * spec.kv_heads;
      spec.soft_cap = 30;
      spec.layers[0].window.left = 4;
      spec.layers[0].sinks.assign(32, 0.0f);
      const auto backend = SelectBackend(spec, AttentionMode::kCausal);
      ASSERT_TRUE(backend.ok()) << backend.status();
      EXPECT_EQ((*backend)->name, "cpu");
    }
  }
}

TEST(Backends, DflashIsRefusedWithTheReason) {
  const absl::Status status = SelectBackend(testing::SmallSpec(), AttentionMode::kDflash).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cpu: mode DFLASH is not offered"));
}

TEST(Backends, EveryLackIsAReason) {
  BackendCapabilities narrow;
  narrow.name = "narrow";
  CacheSpec spec = testing::SmallSpec();
  spec.soft_cap = 1;
  spec.layers[0].window.left = 1;
  spec.layers[0].sinks.assign(4, 0.0f);
  EXPECT_THAT(WhyNot(narrow, spec, AttentionMode::kCausal),
              ElementsAre(HasSubstr("mode"), HasSubstr("head_dim"), HasSubstr("page_size"),
                          HasSubstr("kv_dtype"), HasSubstr("query heads"), HasSubstr("window"),
                          HasSubstr("soft_cap"), HasSubstr("sinks")));
}

TEST(Backends, TheFirstThatFitsIsTaken) {
  BackendCapabilities narrow;
  narrow.name = "narrow";
  BackendCapabilities other = CpuBackend();
  other.name = "other";
  const std::array<const BackendCapabilities*, 3> backends = {&narrow, &other, &CpuBackend()};
  const auto chosen = SelectBackend(backends, testing::SmallSpec(), AttentionMode::kCausal);
  ASSERT_TRUE(chosen.ok());
  EXPECT_EQ((*chosen)->name, "other");
}

}  // namespace
}  // namespace tributary::worker
