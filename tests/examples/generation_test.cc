// Greedy text through a service of four workers is the text of local attention, byte for byte.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "tests/examples/fixtures.h"

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

std::vector<std::string> ContinueLocally(const std::vector<std::string>& prompts, DType kv_dtype) {
  LocalAttention attention(ShippedModel().config(), {.kv_dtype = kv_dtype});
  return Continue(prompts, attention);
}

class Generation : public testing::Test {
 protected:
  static void SetUpTestSuite() { service_ = new Service(StartService(4)); }
  static void TearDownTestSuite() {
    delete service_;
    service_ = nullptr;
  }

  static std::vector<std::string> ContinueRemotely(const std::vector<std::string>& prompts,
                                                   DType kv_dtype) {
    const RemoteAttention remote = OpenAttention(*service_, {.kv_dtype = kv_dtype});
    EXPECT_EQ(remote.cache->ranks(), 4);
    return Continue(prompts, *remote.attention);
  }

  static Service* service_;
};

Service* Generation::service_ = nullptr;

TEST_F(Generation, F16CacheWritesWhatFp32AttentionWrites) {
  const std::vector<std::string> prompts = Prompts();
  const std::vector<std::string> expected = ContinueLocally(prompts, DType::kF32);
  const std::vector<std::string> actual = ContinueRemotely(prompts, DType::kF16);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(actual[i], expected[i]) << "after " << prompts[i].size() << " bytes";
  }
}

// Rounding K and V to bf16 is the cache's doing and may turn a near tie; sharding is not allowed
// to.
TEST_F(Generation, Bf16CacheWritesWhatLocalAttentionOverBf16Writes) {
  const std::vector<std::string> prompts = Prompts();
  const std::vector<std::string> expected = ContinueLocally(prompts, DType::kBf16);
  const std::vector<std::string> actual = ContinueRemotely(prompts, DType::kBf16);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(actual[i], expected[i]) << "after " << prompts[i].size() << " bytes";
  }
  const std::vector<std::string> exact = ContinueLocally(prompts, DType::kF32);
  size_t same = 0;
  for (size_t i = 0; i < prompts.size(); ++i) same += actual[i] == exact[i];
  std::printf("bf16 KV over 4 workers and fp32 attention agree on %zu of %zu prompts\n", same,
              prompts.size());
  RecordProperty("same_as_fp32", static_cast<int>(same));
}

}  // namespace
}  // namespace tributary::tinylm
