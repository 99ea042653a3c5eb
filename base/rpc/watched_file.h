// A small file whose content is wanted as it is now: tokens that are rotated.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"

namespace tributary {

class WatchedFile {
 public:
  // Looks at the file at most once an `interval`.
  WatchedFile(std::string path, std::chrono::milliseconds interval)
      : path_(std::move(path)), interval_(interval) {}

  // The content. `changed`, if wanted, says whether it differs from what the last call returned.
  // When the file cannot be read (it is being replaced, say), the last content that could be. An
  // error only before any could.
  absl::StatusOr<std::string> Read(bool* changed = nullptr);

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  const std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::string content_;
  bool known_ = false;
  std::chrono::steady_clock::time_point next_look_;
};

// The whole of a file of at most `most` bytes. INVALID_ARGUMENT or NOT_FOUND with the path.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t most = size_t{1} << 20);

}  // namespace tributary
