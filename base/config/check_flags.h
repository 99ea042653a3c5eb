// What the programs ask of settings that several of them have. A setting that will not do is told
// when the program starts, by its name, and not when it is first used.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tributary {

// The most threads that a program may be told to compute with.
inline constexpr int kMostThreads = 4096;

// kInvalidArgument, with the flag as its field, unless the address is host:port or unix:/path.
absl::Status CheckAddress(absl::string_view flag, absl::string_view address);

// kInvalidArgument likewise, unless the path is empty or a file that this process may read.
absl::Status CheckReadable(absl::string_view flag, const std::string& path);

}  // namespace tributary
