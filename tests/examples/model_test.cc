#include "examples/tinylm/model.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "examples/tinylm/find_files.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "examples/tinylm/safetensors.h"
#include "nlohmann/json.hpp"
#include "tests/examples/fixtures.h"

namespace tributary::tinylm {
namespace {

// Logits are about 10 in size; float sums over 512 products leave about 1e-5 of that.
constexpr float kLogitTolerance = 1e-3f;

struct Golden {
  std::vector<Token> tokens;
  Matrix logits;
};

Golden ReadGolden() {
  const auto file = Safetensors::Read(ModelFolder() + "/golden.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  const auto tokens = file->Floats("tokens", {-1});
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  const auto rows = static_cast<int64_t>(tokens->size());
  const auto logits = file->Floats("logits", {rows, 256});
  EXPECT_TRUE(logits.ok()) << logits.status();
  return {{tokens->begin(), tokens->end()}, Eigen::Map<const Matrix>(logits->data(), rows, 256)};
}

// Feeds the golden prompt in calls of `chunk` tokens.
void ExpectGoldenLogits(int64_t chunk) {
  const Golden golden = ReadGolden();
  LocalAttention attention(ShippedModel().config());
  const int64_t rows = golden.logits.rows();
  ASSERT_GT(rows, 16);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t count = std::min(chunk, rows - begin);
    const auto logits =
        ShippedModel().Forward(std::span(golden.tokens).subspan(begin, count), begin, attention);
    ASSERT_TRUE(logits.ok()) << logits.status();
    EXPECT_LT((*logits - golden.logits.middleRows(begin, count)).cwiseAbs().maxCoeff(),
              kLogitTolerance)
        << "rows from " << begin;
  }
}

TEST(Model, MatchesGoldenLogitsInOneCall) { ExpectGoldenLogits(1000); }
TEST(Model, MatchesGoldenLogitsInChunks) { ExpectGoldenLogits(7); }
TEST(Model, MatchesGoldenLogitsTokenByToken) { ExpectGoldenLogits(1); }

TEST(Model, RefusesPositionsItHasNotLearnt) {
  LocalAttention attention(ShippedModel().config());
  const std::vector<Token> tokens(2, 'a');
  EXPECT_EQ(ShippedModel()
                .Forward(tokens, ShippedModel().config().max_positions - 1, attention)
                .status()
                .code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ(ShippedModel().Forward(tokens, -1, attention).status().code(),
            absl::StatusCode::kOutOfRange);
}

// Other tools load the file by these names. (LoadWeights reads every one of them, by its shape.)
TEST(Weights, ThoseShippedAreALlamasAndNoMoreThan8Megabytes) {
  const std::string path = ModelFolder() + "/model.safetensors";
  EXPECT_LE(std::filesystem::file_size(path), 8'000'000u);
  const auto text = ReadText(ModelFolder() + "/config.json");
  ASSERT_TRUE(text.ok()) << text.status();
  const auto config = nlohmann::json::parse(*text);
  EXPECT_EQ(config.at("architectures"), nlohmann::json::array({"LlamaForCausalLM"}));
  EXPECT_EQ(config.at("model_type"), "llama");
  EXPECT_EQ(config.at("head_dim"), 64);
  EXPECT_LT(config.at("num_key_value_heads"), config.at("num_attention_heads"));

  const auto file = Safetensors::Read(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::string> names = {"model.embed_tokens.weight", "model.norm.weight"};
  for (int layer = 0; layer < ShippedModel().config().layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    for (const char* name : {"input_layernorm", "post_attention_layernorm", "mlp.down_proj",
                             "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj",
                             "self_attn.q_proj", "self_attn.v_proj"}) {
      names.push_back(prefix + name + ".weight");
    }
  }
  EXPECT_EQ(file->size(), names.size()) << "and nothing else";
  for (const std::string& name : names) {
    // A shape that none has: refused for the shape where the tensor is there.
    EXPECT_EQ(file->Floats(name, {1}).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(Weights, MissingFolderIsNotFound) {
  EXPECT_EQ(LoadWeights("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(Sampler, TemperatureZeroTakesTheFirstOfTheLargest) {
  RowVector logits(4);
  logits << 0, 3, 3, 1;
  EXPECT_EQ(Sampler().Next(logits), 1);
}

TEST(Sampler, DrawsInProportionAndRepeatably) {
  RowVector logits(3);
  logits << std::log(1.0f), std::log(3.0f), -1000.0f;
  Sampler sampler(1.0f, 7);
  Sampler same(1.0f, 7);
  std::vector<int> counts(3);
  for (int i = 0; i < 4000; ++i) {
    const Token token = sampler.Next(logits);
    ASSERT_EQ(token, same.Next(logits));
    ++counts.at(token);
  }
  EXPECT_EQ(counts[2], 0);
  EXPECT_NEAR(counts[1], 3000, 150);  // five standard deviations
}

TEST(Generate, RefusesWhatDoesNotFit) {
  LocalAttention attention(ShippedModel().config());
  EXPECT_EQ(Generate(ShippedModel(), "", 1, Sampler(), attention).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Generate(ShippedModel(), "a", 1024, Sampler(), attention).status().code(),
            absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace tributary::tinylm
