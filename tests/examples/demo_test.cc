// The program that `make demo` runs: what a newcomer sees first.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/process.h"

namespace tributary::tinylm {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{300};  // instrumented, and on a busy machine
constexpr char kPrompt[] = "And it came to pass";

struct Outcome {
  std::optional<test::ExitCode> code;
  std::string out;  // stdout and stderr
};

Outcome RunDemo(std::vector<std::string> flags) {
  const test::TemporaryDirectory directory;
  flags.insert(flags.begin(), {TRIBUTARY_CLI, "demo", "--prompt=" + std::string(kPrompt)});
  test::ChildProcess process(std::move(flags), directory.File("log"));
  Outcome outcome;
  outcome.code = process.Wait(kPatience);
  outcome.out = process.Log();
  return outcome;
}

TEST(Demo, ExplainsItsFlags) {
  const Outcome help = RunDemo({"--help"});
  EXPECT_EQ(help.code, 0);
  for (const char* flag : {"--prompt=", "--tokens=300", "--workers", "--speculate=false"}) {
    EXPECT_THAT(help.out, HasSubstr(flag));
  }
}

TEST(Demo, WritesTextOverFourWorkersWithAnFp8Cache) {
  const Outcome demo = RunDemo({"--tokens=24", "--temperature=0", "--notable"});
  EXPECT_EQ(demo.code, 0) << demo.out;
  EXPECT_THAT(demo.out, HasSubstr("an embedded coordinator, 4 workers on cpu; KV cache fp8_e4m3"));
  // Words, not only bytes.
  const std::regex text("\n" + std::string(kPrompt) + "[ ,;:.][A-Za-z ,;:.'\n]{22}");
  EXPECT_TRUE(std::regex_search(demo.out, text)) << demo.out;
}

#ifndef TRIBUTARY_SHORT_GRID  // scores a window of 1,024 bytes seven times
TEST(Demo, ComparesTheSetUpsRowByRow) {
  const Outcome demo = RunDemo({"--tokens=1", "--table_tokens=8", "--heldout_windows=1"});
  ASSERT_EQ(demo.code, 0) << demo.out;
  for (const char* column : {"attention", "tokens/s", "its share", "perplexity/B", "same greedy"}) {
    EXPECT_THAT(demo.out, HasSubstr(column));
  }
  // tokens/s, attention's share of the time, perplexity, agreement; in this order of rows.
  const std::string figures = " +[0-9.]+ +[0-9]+% +([0-9.]+) +([0-9.]+)%\n";
  std::string table;
  const std::vector<std::string> rows = {"local f32",       "DCP1 bf16",  "DCP4 bf16",
                                         "DCP4 fp8_e4m3",   "DCP4 nvfp4", "DCP4 f32",
                                         "  over a session"};
  for (const std::string& row : rows) table += row + figures;
  std::smatch match;
  ASSERT_TRUE(std::regex_search(demo.out, match, std::regex(table))) << demo.out;
  const double exact = std::stod(match[1]);
  EXPECT_EQ(match[2], "100.00");
  const auto perplexity = [&](size_t row) { return match[2 * row + 1].str(); };
  const auto same_greedy = [&](size_t row) { return match[2 * row + 2].str(); };
  for (size_t row = 1; row < rows.size(); ++row) {
    const bool coarse = rows[row] == "DCP4 nvfp4";
    EXPECT_NEAR(std::stod(perplexity(row)) / exact, 1.0, coarse ? 0.04 : 0.02) << demo.out;
    EXPECT_GT(std::stod(same_greedy(row)), coarse ? 90.0 : 95.0) << demo.out;
  }
  EXPECT_EQ(perplexity(6), perplexity(3)) << "a session computes what calls do\n" << demo.out;
  EXPECT_EQ(same_greedy(6), same_greedy(3)) << demo.out;
}
#endif

TEST(Demo, NamesTheFlagThatIsWrong) {
  const Outcome demo = RunDemo({"--kv_dtype=int4"});
  EXPECT_EQ(demo.code, 1);
  EXPECT_THAT(demo.out, HasSubstr("--kv_dtype=int4"));
}

}  // namespace
}  // namespace tributary::tinylm
