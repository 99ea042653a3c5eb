#include "base/config/flag_help.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <map>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tributary {
namespace {

constexpr size_t kLineWidth = 88;
constexpr size_t kIndent = 6;

std::string Wrap(absl::string_view text) {
  std::string out;
  size_t column = kLineWidth;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column + 1 + word.size() > kLineWidth) {
      absl::StrAppend(&out, out.empty() ? "" : "\n", std::string(kIndent, ' '));
      column = kIndent;
    } else {
      out += ' ';
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out + "\n";
}

bool AsksForHelp(int argc, char** argv) {
  char** const end = std::find(argv + 1, argv + argc, absl::string_view("--"));
  return std::any_of(argv + 1, end, [](absl::string_view argument) {
    return argument == "--help" || argument == "-help" || argument == "-h";
  });
}

}  // namespace

std::string FlagHelp(absl::string_view name, absl::string_view value, absl::string_view help) {
  return absl::StrCat("  --", name, value.empty() ? "" : "=", value, "\n", Wrap(help));
}

bool PrintsHelp(int argc, char** argv, absl::string_view usage, absl::string_view file) {
  if (argc < 1 || !AsksForHelp(argc, argv)) return false;
  std::map<absl::string_view, std::string> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (!absl::EndsWith(flag->Filename(), file)) continue;
    flags[name] = FlagHelp(name, flag->DefaultValue(), flag->Help());
  }
  std::printf("%s: %s\n\n", std::filesystem::path(argv[0]).filename().c_str(),
              std::string(usage).c_str());
  for (const auto& [name, help] : flags) std::fputs(help.c_str(), stdout);
  return true;
}

}  // namespace tributary
