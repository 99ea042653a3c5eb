// The draft through a service: its logits are PyTorch's, and text written with it is the text
// written without.
#include "examples/tinylm/draft.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "examples/tinylm/acceptance.h"
#include "examples/tinylm/evaluate.h"
#include "examples/tinylm/generate.h"
#include "examples/tinylm/local_attention.h"
#include "examples/tinylm/safetensors.h"
#include "examples/tinylm/speculate.h"
#include "tests/examples/fixtures.h"

namespace tributary::tinylm {
namespace {

#ifdef TRIBUTARY_SHORT_GRID
constexpr int64_t kTokens = 24;
constexpr int64_t kPrompts = 2;
constexpr int64_t kManyPrompts = 2;
#else
constexpr int64_t kTokens = 96;
constexpr int64_t kPrompts = 4;
constexpr int64_t kManyPrompts = 32;  // of which a step is well under 1%
#endif
constexpr int64_t kBlock = 8;
constexpr double kTie = 0.01;  // in logits: one byte is at most 1% likelier than the other

// ---------------------------------------------------------------------------------------- golden

// A block behind a text, computed by train_draft.py in float64 with a dense mask.
struct Golden {
  std::vector<Token> tokens;  // the text and the anchor
  Matrix full, sliding;       // [block - 1, 256]
};

Golden ReadGolden() {
  const auto file = Safetensors::Read(ModelFolder() + "/draft_golden.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  const auto tokens = file->Floats("tokens", {-1});
  EXPECT_TRUE(tokens.ok()) << tokens.status();
  Golden golden;
  golden.tokens = {tokens->begin(), tokens->end()};
  for (auto& [name, into] :
       std::map<std::string, Matrix*>{{"full", &golden.full}, {"sliding", &golden.sliding}}) {
    const auto logits = file->Floats(name, {-1, 256});
    EXPECT_TRUE(logits.ok()) << logits.status();
    *into = Eigen::Map<const Matrix>(logits->data(), logits->size() / 256, 256);
  }
  return golden;
}

class GoldenDraft : public testing::TestWithParam<int> {};

TEST_P(GoldenDraft, LogitsAreThoseOfADenseMask) {
  const Golden golden = ReadGolden();
  const Draft& draft = ShippedDraft();
  const std::vector<Token> text(golden.tokens.begin(), golden.tokens.end() - 1);
  const auto length = static_cast<int64_t>(text.size());
  LocalAttention local(ShippedModel().config());
  StateTap tap{.layers = draft.config().target_layers, .states = {}};
  ASSERT_TRUE(ShippedModel().Forward(text, 0, local, &tap).ok());

  const Service service = StartService(GetParam());
  for (const int64_t window : {-1, 20}) {
    const RemoteDraft remote = OpenDraft(service, {.kv_dtype = DType::kF16, .window_left = window});
    ASSERT_TRUE(draft.Extend(0, tap.states, *remote.attention).ok());
    const Matrix& expected = window < 0 ? golden.full : golden.sliding;
    const auto logits =
        draft.Guess(golden.tokens.back(), length, expected.rows() + 1, *remote.attention);
    ASSERT_TRUE(logits.ok()) << logits.status();
    // Logits of size about 10; what is rounded is the context's K and V, to 2^-11 of themselves.
    EXPECT_LT((*logits - expected).cwiseAbs().maxCoeff(), 0.02f) << "window " << window;
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, GoldenDraft, testing::Values(1, 3, 4));

// ------------------------------------------------------------------------- what verification needs

// Rows that are verified together have the bits that they have one by one.
TEST(Verification, ARowsLogitsDoNotDependOnItsCompany) {
  const Service service = StartService(3);
  const RemoteAttention together = OpenAttention(service, {.kv_dtype = DType::kFp8E4M3});
  const RemoteAttention alone = OpenAttention(service, {.kv_dtype = DType::kFp8E4M3});
  const std::string text = HeldOutSample().substr(300, 50);
  const std::vector<Token> tokens(text.begin(), text.end());
  int64_t position = 0;
  for (const int64_t rows : {7, 1, 16, 2, 3, 9}) {
    const auto chunk = std::span(tokens).subspan(position, rows);
    const auto logits = ShippedModel().Forward(chunk, position, *together.attention);
    ASSERT_TRUE(logits.ok()) << logits.status();
    for (int64_t row = 0; row < rows; ++row) {
      const auto single =
          ShippedModel().Forward(chunk.subspan(row, 1), position + row, *alone.attention);
      ASSERT_TRUE(single.ok()) << single.status();
      ASSERT_EQ(Matrix(logits->row(row)), *single) << "position " << position + row;
    }
    position += rows;
  }
}

// ------------------------------------------------------------------------------------ speculation

struct Sample {
  std::vector<std::string> texts;
  std::vector<SpeculationCounts> counts;  // one a text

  double acceptance_length() const { return AcceptanceLength(counts).value; }
};

class Speculation : public testing::TestWithParam<DType> {
 protected:
  static std::vector<std::string> Prompts(int64_t count = kPrompts) {
    return Windows(HeldOutSample(), count, 64);
  }

  static ServiceCacheOptions Options(bool of_draft, DType type) {
    const std::string text = HeldOutSample().substr(0, 1024);
    const auto scales = of_draft ? CalibrateDraftScales(ShippedModel(), ShippedDraft(), text, type)
                                 : CalibrateScales(ShippedModel(), text, type);
    EXPECT_TRUE(scales.ok()) << scales.status();
    return {.kv_dtype = type, .scales = *scales};
  }

  // `model_type` is of the model's cache; the draft's is the parameter.
  static Sample Write(const Service& service, DType model_type, int64_t window_left,
                      int64_t prompts = kPrompts) {
    const RemoteAttention target = OpenAttention(service, Options(false, model_type));
    ServiceCacheOptions options = Options(true, GetParam());
    options.window_left = window_left;
    const RemoteDraft draft = OpenDraft(service, options);
    Sample sample;
    for (const std::string& prompt : Prompts(prompts)) {
      const auto written = Speculate(ShippedModel(), ShippedDraft(), prompt, kTokens, kBlock,
                                     *target.attention, *draft.attention);
      EXPECT_TRUE(written.ok()) << written.status();
      sample.texts.push_back(written.ok() ? written->text : "");
      sample.counts.push_back(written.ok() ? written->counts : SpeculationCounts{});
    }
    return sample;
  }

  // By how much the model, with a cache of this type, prefers one of two texts behind a prompt to
  // the other, in logits of the byte at which they part; 0 where they do not.
  static double Preference(const std::string& prompt, const std::string& a, const std::string& b,
                           DType model_type) {
    const auto parted = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    if (parted.first == a.end() || parted.second == b.end()) {
      EXPECT_EQ(a, b);
      return 0.0;
    }
    LocalAttention attention(ShippedModel().config(), {.kv_dtype = model_type});
    const std::string text = prompt + std::string(a.begin(), parted.first);
    const std::vector<Token> tokens(text.begin(), text.end());
    Matrix last;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto logits = ShippedModel().Forward(std::span(tokens).subspan(i, 1),
                                                 static_cast<int64_t>(i), attention);
      EXPECT_TRUE(logits.ok()) << logits.status();
      last = logits.value_or(Matrix::Zero(1, 256));
    }
    const auto logit = [&](char c) { return last(0, static_cast<unsigned char>(c)); };
    return std::abs(logit(*parted.first) - logit(*parted.second));
  }

  static std::vector<std::string> WritePlainly(const Service& service) {
    const RemoteAttention target = OpenAttention(service, Options(false, GetParam()));
    std::vector<std::string> texts;
    for (const std::string& prompt : Prompts()) {
      const auto text = Generate(ShippedModel(), prompt, kTokens, Sampler(), *target.attention);
      EXPECT_TRUE(text.ok()) << text.status();
      texts.push_back(text.value_or(""));
    }
    return texts;
  }
};

TEST_P(Speculation, WritesTheTextOfPlainDecodingInFewerSteps) {
  for (const int workers : {1, 4}) {
    const Service service = StartService(workers);
    const std::vector<std::string> plain = WritePlainly(service);
    for (const int64_t window : {int64_t{-1}, ShippedDraft().config().sliding_window_left}) {
      const Sample sample = Write(service, GetParam(), window);
      EXPECT_EQ(sample.texts, plain) << workers << " workers, window " << window;
      for (const SpeculationCounts& counts : sample.counts) {
        EXPECT_EQ(counts.tokens, kTokens - 1) << "the prompt gives the first";
      }
      EXPECT_GT(sample.acceptance_length(), 3.0) << workers << " workers, window " << window;
    }
  }
}

// Of one text: the model's cache is bf16, whose greedy text behind these prompts depends on the
// number of workers only where two bytes are as good as equally likely. (An FP8 model's does more
// often.) There, and now and then about a step, rounding decides, and with it the width of the
// processor's vectors.
TEST_P(Speculation, ShardingCostsNoAcceptance) {
  for (const int64_t window : {int64_t{-1}, ShippedDraft().config().sliding_window_left}) {
    const Sample one = Write(StartService(1), DType::kBf16, window, kManyPrompts);
    const Sample four = Write(StartService(4), DType::kBf16, window, kManyPrompts);
    const std::vector<std::string> prompts = Prompts(kManyPrompts);
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_LT(Preference(prompts[i], one.texts[i], four.texts[i], DType::kBf16), kTie)
          << one.texts[i] << "\nand\n"
          << four.texts[i] << "\nwindow " << window;
    }
    EXPECT_NEAR(four.acceptance_length() / one.acceptance_length(), 1.0, 0.01)
        << "window " << window;
  }
}

// Whatever the model's cache holds, and though its own text may be another: along the text that one
// worker gave, every prompt takes the same steps but for one, as rounding decides.
TEST_P(Speculation, ShardingCostsNoAcceptanceAlongOneText) {
  const Sample one = Write(StartService(1), GetParam(), -1);
  const Service service = StartService(4);
  const RemoteAttention target = OpenAttention(service, Options(false, GetParam()));
  const RemoteDraft draft = OpenDraft(service, Options(true, GetParam()));
  for (size_t i = 0; i < one.texts.size(); ++i) {
    const auto four = SpeculateAlong(ShippedModel(), ShippedDraft(), Prompts()[i], one.texts[i],
                                     kBlock, *target.attention, *draft.attention);
    ASSERT_TRUE(four.ok()) << four.status();
    EXPECT_EQ(four->tokens, one.counts[i].tokens);
    EXPECT_NEAR(four->steps, one.counts[i].steps, 1) << "prompt " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(KvDTypes, Speculation, testing::Values(DType::kBf16, DType::kFp8E4M3),
                         [](const testing::TestParamInfo<DType>& param) {
                           return std::string(Name(param.param));
                         });

TEST(Speculate, RefusesWhatDoesNotFit) {
  const Service service = StartService(1);
  const RemoteAttention target = OpenAttention(service, {});
  const RemoteDraft draft = OpenDraft(service, {});
  const auto write = [&](const std::string& prompt, int64_t count, int64_t block) {
    return Speculate(ShippedModel(), ShippedDraft(), prompt, count, block, *target.attention,
                     *draft.attention)
        .status()
        .code();
  };
  EXPECT_EQ(write("", 1, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write("a", 5, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(write("a", 1024, 8), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(write(std::string(1000, 'a'), 24, 8), absl::StatusCode::kOk);  // to the last position
}

TEST(SpeculateAlong, TheTextThatSpeculateWritesTakesTheSameSteps) {
  const Service service = StartService(2);
  const RemoteAttention target = OpenAttention(service, {});
  const RemoteDraft draft = OpenDraft(service, {});
  const std::string prompt = Windows(HeldOutSample(), 1, 64)[0];
  const auto written = Speculate(ShippedModel(), ShippedDraft(), prompt, kTokens, kBlock,
                                 *target.attention, *draft.attention);
  ASSERT_TRUE(written.ok()) << written.status();
  const auto along = SpeculateAlong(ShippedModel(), ShippedDraft(), prompt, written->text, kBlock,
                                    *target.attention, *draft.attention);
  ASSERT_TRUE(along.ok()) << along.status();
  EXPECT_EQ(along->steps, written->counts.steps);
  EXPECT_EQ(along->tokens, written->counts.tokens);
}

// Along a text that the model would not write: the caches end up with that text and no other.
TEST(SpeculateAlong, AnyTextLeavesItsOwnTokensInTheCaches) {
  const Service service = StartService(2);
  const RemoteAttention target = OpenAttention(service, {});
  const RemoteDraft draft = OpenDraft(service, {});
  const std::string held_out = HeldOutSample().substr(2000, 64 + kTokens);
  const std::string prompt = held_out.substr(0, 64);
  const auto along = SpeculateAlong(ShippedModel(), ShippedDraft(), prompt, held_out.substr(64),
                                    kBlock, *target.attention, *draft.attention);
  ASSERT_TRUE(along.ok()) << along.status();
  EXPECT_EQ(along->tokens, kTokens - 1);
  EXPECT_LT(along->steps, along->tokens);
  EXPECT_GT(along->steps * kBlock, along->tokens);

  const RemoteAttention fed = OpenAttention(service, {});
  const RemoteDraft fed_draft = OpenDraft(service, {});
  StateTap tap{.layers = ShippedDraft().config().target_layers, .states = {}};
  const std::vector<Token> tokens(held_out.begin(), held_out.end());
  const auto last = static_cast<int64_t>(tokens.size()) - 1;
  for (int64_t position = 0; position < last;) {
    const int64_t rows = std::min<int64_t>(64, last - position);
    ASSERT_TRUE(
        ShippedModel()
            .Forward(std::span(tokens).subspan(position, rows), position, *fed.attention, &tap)
            .ok());
    ASSERT_TRUE(ShippedDraft().Extend(position, tap.states, *fed_draft.attention).ok());
    position += rows;
  }
  const auto guess = [&](DraftAttention& attention) {
    const auto logits = ShippedDraft().Guess(tokens.back(), last, kBlock, attention);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.value_or(Matrix());
  };
  const auto next = [&](Attention& attention) {
    const auto logits = ShippedModel().Forward(std::span(tokens).subspan(last), last, attention);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.value_or(Matrix());
  };
  EXPECT_EQ(guess(*draft.attention), guess(*fed_draft.attention));
  EXPECT_EQ(next(*target.attention), next(*fed.attention));
}

TEST(SpeculateAlong, RefusesWhatDoesNotFit) {
  const Service service = StartService(1);
  const RemoteAttention target = OpenAttention(service, {});
  const RemoteDraft draft = OpenDraft(service, {});
  const auto follow = [&](const std::string& prompt, const std::string& text, int64_t block) {
    return SpeculateAlong(ShippedModel(), ShippedDraft(), prompt, text, block, *target.attention,
                          *draft.attention)
        .status()
        .code();
  };
  EXPECT_EQ(follow("", "b", 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(follow("a", "", 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(follow("a", "b", 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(follow("a", std::string(1024, 'b'), 8), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(follow("a", "b", 8), absl::StatusCode::kOk);
}

TEST(LoadDraft, RefusesADraftOfAnotherTarget) {
  ModelConfig other = ShippedModel().config();
  other.layers = 3;
  EXPECT_EQ(LoadDraft(ModelFolder(), other).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadDraft("/nonexistent", other).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace tributary::tinylm
