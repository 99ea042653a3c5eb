// A YAML file as a source of flags: one mapping, flag name to value.
//
//   workers: 4
//   listen: 0.0.0.0:7400
//   trusted-peers: [a, b]     # a sequence is the values joined by commas
//
// `-` and `_` in names are the same, in the file and on the command line. There is no second list
// of settings to keep in step with the flags: every flag may stand in the file, and nothing else
// may.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tributary {

// The program's arguments with the settings of the file named by --config (if any) put before them,
// ready for absl::ParseCommandLine: what is on the command line wins. kInvalidArgument names the
// file and the setting that is not a flag, not a scalar, or given twice ('-' and '_' being the
// same); kNotFound a file that cannot be read.
absl::StatusOr<std::vector<std::string>> ArgumentsWithConfigFile(int argc, char** argv);

// Settings of a file: flag name, with '_', to value as the flag would be given it.
using Settings = std::map<std::string, std::string>;
absl::StatusOr<Settings> SettingsOfFile(const std::string& path);

// The file that --config names; empty when there is none.
std::string ConfigFileOf(int argc, char** argv);

// The names of the flags on the command line, with '_'; "no" of a flag that is turned off is not
// part of its name.
std::set<std::string> FlagsGiven(int argc, char** argv);

}  // namespace tributary
