// What programs say on --help.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace tributary {

// A flag with the value it has when it is not given, and below, indented, what it is for.
std::string FlagHelp(absl::string_view name, absl::string_view value, absl::string_view help);

// When --help (or -h) is among the arguments: prints `usage` and the Abseil flags that are defined
// in `file` (the end of a source file's path), by name. Returns whether it was, and the program is
// to end with status 0 then: absl::ParseCommandLine would end it with 1, and print the flags of all
// libraries or of none. Its --help=PART and --helpfull are left to it.
bool PrintsHelp(int argc, char** argv, absl::string_view usage, absl::string_view file);

}  // namespace tributary
