// Greedy text through a service of four workers is the text of local attention, byte for byte.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "tests/examples/fixtures.h"
#include "worker/cuda_backend.h"

namespace tributary::tinylm {
namespace {

#ifdef TRIBUTARY_SHORT_GRID
constexpr int64_t kTokens = 16;
constexpr int kPrompts = 6;
#else
constexpr int64_t kTokens = 64;
constexpr int kPrompts = 20;
#endif

// Lengths of the prompts: fewer tokens than workers, around the page and the stride of four workers
// (16 and 64 tokens), around the longest call that is read back from the cache (64 rows), and long.
constexpr int kLengths[] = {1,  2,  3,  4,  5,   15,  16,  17,  31,  47,
                            63, 64, 65, 66, 100, 127, 128, 129, 300, 700};
static_assert(std::size(kLengths) == 20);

// Pieces of held-out text, each from another place.
std::vector<std::string> Prompts() {
  const std::string text = HeldOutSample();
  std::vector<std::string> prompts;
  for (int i = 0; i < kPrompts; ++i) {
    const size_t index = i * std::size(kLengths) / kPrompts;
    prompts.push_back(text.substr(500 + index * 2900, kLengths[index]));
  }
  return prompts;
}

std::vector<std::string> Continue(const std::vector<std::string>& prompts, Attention& attention) {
  std::vector<std::string> texts;
  for (const std::string& prompt : prompts) {
    const auto text = Generate(ShippedModel(), prompt, kTokens, Sampler(), attention);
    EXPECT_TRUE(text.ok()) << text.status();
    texts.push_back(text.value_or(""));
    EXPECT_EQ(texts.back().size(), static_cast<size_t>(kTokens));
  }
  return texts;
}

class Generation : public testing::TestWithParam<DType> {
 protected:
  // What fp32 attention in this process writes; the same for every type of cache.
  static const std::vector<std::string>& Expected() {
    static const std::vector<std::string> texts = [] {
      LocalAttention attention(ShippedModel().config());
      return Continue(Prompts(), attention);
    }();
    return texts;
  }
};

TEST_P(Generation, OverFourWorkersWritesWhatLocalFp32AttentionWrites) {
  const std::vector<std::string> prompts = Prompts();
  const Service service = StartService(4);
  const RemoteAttention remote = OpenAttention(service, {.kv_dtype = GetParam()});
  ASSERT_EQ(remote.cache->ranks(), 4);
  const std::vector<std::string> actual = Continue(prompts, *remote.attention);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(actual[i], Expected()[i]) << "after " << prompts[i].size() << " bytes";
  }
}

INSTANTIATE_TEST_SUITE_P(KvDTypes, Generation, testing::Values(DType::kF16, DType::kBf16),
                         [](const testing::TestParamInfo<DType>& param) {
                           return std::string(Name(param.param));
                         });

// GPUs, one per worker, that exchange in host memory or in their own.
class GpuGeneration : public testing::TestWithParam<std::tuple<int, worker::ExchangePlace>> {};

TEST_P(GpuGeneration, WritesWhatLocalFp32AttentionWrites) {
  const auto [workers, place] = GetParam();
  const absl::Status gpus = worker::CheckGpus(0, workers);
  if (!gpus.ok()) GTEST_SKIP() << gpus.message();
  const std::vector<std::string> prompts = Prompts();
  LocalAttention local(ShippedModel().config());
  const std::vector<std::string> expected = Continue(prompts, local);
  const Service service = StartService(workers, worker::Device::kCuda, place);
  const RemoteAttention remote = OpenAttention(service, {.kv_dtype = DType::kF16});
  ASSERT_EQ(remote.cache->ranks(), workers);
  ASSERT_EQ(remote.cache->backend(), "cuda");
  const std::vector<std::string> actual = Continue(prompts, *remote.attention);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(actual[i], expected[i]) << "after " << prompts[i].size() << " bytes";
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, GpuGeneration,
                         testing::Combine(testing::Values(1, 2, 4),
                                          testing::Values(worker::ExchangePlace::kHost,
                                                          worker::ExchangePlace::kAuto)),
                         [](const auto& grid) {
                           return std::to_string(std::get<0>(grid.param)) + "_" +
                                  worker::Name(std::get<1>(grid.param));
                         });

}  // namespace
}  // namespace tributary::tinylm
