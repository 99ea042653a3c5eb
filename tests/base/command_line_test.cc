#include "base/config/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "base/status/errors.h"
#include "tests/support/process.h"

ABSL_FLAG(std::string, config, "", "");
ABSL_FLAG(int, command_line_number, 1, "");
ABSL_FLAG(bool, command_line_truth, true, "");

namespace tributary {
namespace {

using ::testing::HasSubstr;

absl::Status Parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ParseCommandLine(static_cast<int>(argv.size()), argv.data());
}

TEST(CommandLine, SetsFlagsInEverySpelling) {
  ASSERT_EQ(Parse({"--command-line-number=2", "--nocommand_line_truth"}), absl::OkStatus());
  EXPECT_EQ(absl::GetFlag(FLAGS_command_line_number), 2);
  EXPECT_FALSE(absl::GetFlag(FLAGS_command_line_truth));
  ASSERT_EQ(Parse({"--command_line_truth", "--command_line_number", "-3"}), absl::OkStatus());
  EXPECT_EQ(absl::GetFlag(FLAGS_command_line_number), -3);
  EXPECT_TRUE(absl::GetFlag(FLAGS_command_line_truth));
}

// Abseil would end the program, with code 1, over each of these.
TEST(CommandLine, WhatIsWrongIsAnErrorThatNamesTheFlag) {
  const auto error = [](std::vector<std::string> arguments) {
    const absl::Status status = Parse(std::move(arguments));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(error({"--no_such_flag=1"}), "no_such_flag: no such flag; --help lists them");
  EXPECT_EQ(error({"--nocommand_line_number"}),
            "nocommand_line_number: no such flag; --help lists them");
  EXPECT_EQ(error({"--command_line_number=many"}), "command_line_number: cannot be 'many'");
  EXPECT_EQ(error({"--command_line_number", "many"}), "command_line_number: cannot be 'many'");
  EXPECT_EQ(error({"--command_line_number"}), "command_line_number: wants a value");
  EXPECT_EQ(error({"words"}), "unexpected argument 'words'");
  EXPECT_EQ(error({"--command_line_truth", "false"}), "unexpected argument 'false'");
  EXPECT_EQ(Parse({"--config=/nowhere/at/all"}).code(), absl::StatusCode::kNotFound);
}

TEST(CommandLine, ASettingThatAFileGivesTwiceIsNamed) {
  const test::TemporaryDirectory directory;
  const std::string file = directory.File("settings.yaml");
  for (const char* other : {"command_line_number", "command-line-number"}) {
    std::ofstream(file) << "command_line_number: 5\ncommand_line_truth: true\n" << other << ": 6\n";
    const absl::Status status = Parse({"--config=" + file});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "config: " + file + ": command_line_number is given twice");
  }
  std::ofstream(file) << "command_line_number: 5\ncommand_line_truth: true\n";
  EXPECT_EQ(Parse({"--config=" + file}), absl::OkStatus());
  EXPECT_EQ(absl::GetFlag(FLAGS_command_line_number), 5);
}

TEST(CommandLine, StartErrorsHaveOneForm) {
  testing::internal::CaptureStderr();
  PrintStartError("program", InvalidField("rank", "must be >= -1"));
  PrintStartError("program", absl::NotFoundError("config: cannot read /a"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "program: --rank: must be >= -1\nprogram: config: cannot read /a\n");
}

}  // namespace
}  // namespace tributary
