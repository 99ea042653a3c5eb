#include "base/config/command_line.h"

#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/config/config_file.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

namespace tributary {
namespace {

// Abseil's own, which are not in the registry of flags.
bool IsAbseils(absl::string_view name) {
  return absl::StartsWith(name, "help") || name == "version" || name == "flagfile" ||
         name == "undefok";
}

absl::Status CheckValue(absl::CommandLineFlag& flag, absl::string_view value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  return InvalidField(flag.Name(), absl::StrCat("cannot be '", value, "'"));
}

// The arguments, each flag as one word "--name=value". Abseil ends the program with code 1 over one
// that it cannot take: those are found here.
absl::StatusOr<std::vector<std::string>> Checked(const std::vector<std::string>& arguments) {
  std::vector<std::string> checked = {arguments[0]};
  for (size_t i = 1; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (!absl::ConsumePrefix(&argument, "--") || argument.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", arguments[i], "'"));
    }
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    checked.push_back(arguments[i]);
    if (IsAbseils(name)) continue;
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    if (flag == nullptr) {
      absl::string_view positive = name;
      const bool negative =
          equals == absl::string_view::npos && absl::ConsumePrefix(&positive, "no");
      flag = negative ? absl::FindCommandLineFlag(positive) : nullptr;
      if (flag != nullptr && flag->IsOfType<bool>()) continue;
      return InvalidField(name, "no such flag; --help lists them");
    }
    if (equals != absl::string_view::npos) {
      TRIBUTARY_RETURN_IF_ERROR(CheckValue(*flag, argument.substr(equals + 1)));
    } else if (!flag->IsOfType<bool>()) {
      if (i + 1 == arguments.size()) return InvalidField(name, "wants a value");
      TRIBUTARY_RETURN_IF_ERROR(CheckValue(*flag, arguments[++i]));
      absl::StrAppend(&checked.back(), "=", arguments[i]);
    }
  }
  return checked;
}

}  // namespace

absl::Status ParseCommandLine(int argc, char** argv) {
  TRIBUTARY_ASSIGN_OR_RETURN(const std::vector<std::string> arguments,
                             ArgumentsWithConfigFile(argc, argv));
  TRIBUTARY_ASSIGN_OR_RETURN(std::vector<std::string> checked, Checked(arguments));
  std::vector<char*> pointers;
  pointers.reserve(checked.size());
  for (std::string& argument : checked) pointers.push_back(argument.data());
  absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  return absl::OkStatus();
}

void PrintStartError(const char* program, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s%s\n", program, FieldOf(status).empty() ? "" : "--",
               std::string(status.message()).c_str());
}

}  // namespace tributary
