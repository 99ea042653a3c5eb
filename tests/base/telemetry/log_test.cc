#include "base/telemetry/log.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace tributary::telemetry {
namespace {

TEST(LogTest, JsonIsEscapedAndTextIsPlain) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, LogLevel::kInfo, "T", "a \"b\"\n", {{"k", "v"}}),
            "{\"ts\":\"T\",\"level\":\"info\",\"msg\":\"a \\\"b\\\"\\n\",\"k\":\"v\"}\n");
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kError, "T", "m", {{"k", "v"}}),
            "T error m k=v\n");
}

TEST(LogTest, ClientsStringsNeitherBeginLinesNorSteerTerminals) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, LogLevel::kInfo, "T", "a\nb",
                          {{"k", "v\r\nT error forged\x1b[2J\xc2\x9b"}}),
            "T info a\\x0ab k=v\\x0d\\x0aT error forged\\x1b[2J\\xc2\\x9b\n");
}

TEST(LogTest, NumbersAreNumbersInJson) {
  const std::string line =
      FormatLogLine(LogFormat::kJson, LogLevel::kWarning, "T", "m",
                    {{"rank", -1},
                     {"epoch", uint64_t{7}},
                     {"duration_s", 0.25},
                     {"ready", true},
                     {"not_a_number", std::numeric_limits<double>::quiet_NaN()},
                     {"digits", "12"}});
  const nlohmann::json json = nlohmann::json::parse(line);
  EXPECT_EQ(json["rank"], -1);
  EXPECT_EQ(json["epoch"], 7);
  EXPECT_EQ(json["duration_s"], 0.25);
  EXPECT_EQ(json["ready"], 1);
  EXPECT_TRUE(json["not_a_number"].is_string());
  EXPECT_EQ(json["digits"], "12");
}

TEST(LogTest, BytesThatAreNotUtf8DoNotSpoilTheLine) {
  const std::string line =
      FormatLogLine(LogFormat::kJson, LogLevel::kInfo, "T", "\xff\xfe", {{"k", "\xc3"}});
  EXPECT_FALSE(nlohmann::json::parse(line, nullptr, false).is_discarded()) << line;
}

TEST(LogTest, BelowTheLevelNothingIsWritten) {
  std::FILE* sink = std::tmpfile();
  const Logger log(LogLevel::kWarning, LogFormat::kText, sink);
  log.Info("no");
  EXPECT_FALSE(log.Logs(LogLevel::kInfo));
  EXPECT_TRUE(log.Logs(LogLevel::kWarning));
  EXPECT_EQ(std::ftell(sink), 0);
  log.Warning("yes");
  EXPECT_GT(std::ftell(sink), 0);
  std::fclose(sink);
}

}  // namespace
}  // namespace tributary::telemetry
