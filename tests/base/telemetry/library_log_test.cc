#include "base/telemetry/library_log.h"

#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::worker {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// A log in a file, and what the libraries wrote to it.
class LibraryLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = std::fopen(directory_.File("log").c_str(), "w");
    ASSERT_NE(file_, nullptr);
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_INFO);
  }
  void TearDown() override {
    // The file closes; the libraries go on.
    LogLibrariesTo(std::make_shared<const telemetry::Logger>(telemetry::LogLevel::kError,
                                                             telemetry::LogFormat::kText));
    std::fclose(file_);
  }
  void LogAt(telemetry::LogLevel level) {
    LogLibrariesTo(
        std::make_shared<const telemetry::Logger>(level, telemetry::LogFormat::kJson, file_));
  }
  std::vector<json> Lines() {
    std::fflush(file_);
    std::istringstream text(test::ReadWholeFile(directory_.File("log")));
    std::vector<json> lines;
    for (std::string line; std::getline(text, line);) {
      lines.push_back(json::parse(line, nullptr, false));
      EXPECT_TRUE(lines.back().is_object()) << line;
    }
    return lines;
  }

  const test::TemporaryDirectory directory_;
  std::FILE* file_ = nullptr;
};

TEST_F(LibraryLogTest, ProtobufsComplaintsAreLinesOfOurs) {
  LogAt(telemetry::LogLevel::kInfo);
  v1::DeleteCacheRequest request;
  // Field 1, two bytes that are no UTF-8.
  EXPECT_FALSE(request.ParseFromString("\x0a\x02\xff\xfe"));
  const std::vector<json> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0]["level"], "error");
  EXPECT_EQ(lines[0]["library"], "protobuf");
  EXPECT_THAT(lines[0]["msg"].get<std::string>(), HasSubstr("invalid UTF-8"));
}

TEST_F(LibraryLogTest, GrpcsErrorsAreLinesOfOurs) {
  LogAt(telemetry::LogLevel::kInfo);
  gpr_log(GPR_ERROR, "no %s", "luck");
  const std::vector<json> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0]["level"], "error");
  EXPECT_EQ(lines[0]["library"], "grpc");
  EXPECT_EQ(lines[0]["msg"], "no luck");
  EXPECT_TRUE(lines[0]["line"].is_number());
}

TEST_F(LibraryLogTest, OurLevelHolds) {
  LogAt(telemetry::LogLevel::kError);
  gpr_log_message(__FILE__, __LINE__, GPR_LOG_SEVERITY_INFO, "chatter");
  EXPECT_THAT(Lines(), SizeIs(0));
  gpr_log_message(__FILE__, __LINE__, GPR_LOG_SEVERITY_ERROR, "trouble");
  EXPECT_THAT(Lines(), SizeIs(1));
}

}  // namespace
}  // namespace tributary::worker
