#include "base/process/version.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace tributary {

std::string VersionLine(absl::string_view program) {
  return absl::StrCat(program, " ", TRIBUTARY_VERSION, " (commit ", BuildCommit(), ")\n");
}

bool PrintsVersion(int argc, char** argv, absl::string_view program) {
  char** const end = std::find(argv + 1, argv + argc, absl::string_view("--"));
  if (std::find(argv + 1, end, absl::string_view("--version")) == end) return false;
  std::fputs(VersionLine(program).c_str(), stdout);
  return true;
}

}  // namespace tributary
