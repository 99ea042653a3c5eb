// The command line of a program with Abseil's flags, parsed without ending the program: every bad
// flag is an error of one form, for which programs exit with one code.
#pragma once

#include "absl/status/status.h"

namespace tributary {

// The exit code of every program for flags or settings that it cannot take.
inline constexpr int kExitWrongUsage = 2;

// Sets flags from the --config file (base/config/config_file.h) and the command line, which wins.
// INVALID_ARGUMENT or NOT_FOUND names the flag: one that does not exist, a value that is missing or
// not of the flag's type, an argument that is no flag. --version, --helpfull and the like print and
// end the program with code 0 or 1.
absl::Status ParseCommandLine(int argc, char** argv);

// How a program prints why it does not start: "PROGRAM: --flag: why". A status that names no flag
// (a file, a GPU) is printed as it is.
void PrintStartError(const char* program, const absl::Status& status);

}  // namespace tributary
