// Where the weights and the held-out text lie.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace tributary::tinylm {

// The folder that holds weights/ and heldout.txt: beside the executable as installed
// (../share/tributary/tinylm; a build tree is laid out alike), or examples/tinylm of the source
// tree that the executable or the working directory lies in. NOT_FOUND lists where it looked.
absl::StatusOr<std::string> FindModelFolder();

absl::StatusOr<std::string> ReadText(const std::string& path);

}  // namespace tributary::tinylm
