// What a program says on --version.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace tributary {

// The commit that the program was built from, abbreviated, or "unknown" where the sources came
// without their history and nobody said (TRIBUTARY_COMMIT in the environment of the build).
const char* BuildCommit();

// What tells builds apart, of programs that talk to each other: the project's version and the
// commit, "0.1.0-g0123456789ab", as git describe writes them.
std::string BuildVersion();

// "PROGRAM 0.1.0 (commit 0123456789ab)", with an end of line.
std::string VersionLine(absl::string_view program);

// When --version is among the arguments: prints the line. Returns whether it was, and the program
// is to end with status 0 then.
bool PrintsVersion(int argc, char** argv, absl::string_view program);

}  // namespace tributary
